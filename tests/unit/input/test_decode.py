"""decode_csv: what counts as which value, errors, and the compiled loop against the exact way."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strategies.errors import InvalidArgumentError
from strategies.input.csv import decode_csv, parser

F32, F64, I32, I64 = (np.dtype(name) for name in ("float32", "float64", "int32", "int64"))


def required(dtype):
    return np.array([], dtype)


@pytest.fixture(params=["exact", "compiled"], autouse=True)
def way(request, monkeypatch):
    monkeypatch.setattr(
        parser, "_fields_before_loop", 0 if request.param == "compiled" else 1 << 62
    )


def check(records, defaults, expected, **options):
    columns = decode_csv(records, defaults, **options)
    assert len(columns) == len(expected)
    for column, values in zip(columns, expected, strict=True):
        assert column.tolist() == values


def fails(records, defaults, match, **options):
    with pytest.raises(InvalidArgumentError, match=match):
        decode_csv(records, defaults, **options)


def test_simple():
    check(["1", "2", '"3"'], [[1]], [[1, 2, 3]])
    check(["1", "2", '"3"'], [1], [[1, 2, 3]])


def test_default_types():
    columns = decode_csv(["1,2,3,4,5,6"], [1, 1.0, "x", I64.type(1), [1.0], F64.type(1)])
    assert [c.dtype for c in columns] == [I32, F32, object, I64, F32, F64]
    assert decode_csv(["1"], [[]])[0].dtype == F32
    assert decode_csv(["1"], [required(str)])[0].tolist() == ["1"]
    assert decode_csv(["a"], [np.array(["d"], object)])[0].tolist() == ["a"]


@pytest.mark.parametrize(
    ("default", "error"),
    [
        ([[1]], ValueError),
        ([1, 2], ValueError),
        (True, TypeError),
        (np.uint8(1), TypeError),
        (np.float16(1), TypeError),
        (b"bytes", TypeError),
        (None, TypeError),
        (2**40, ValueError),
        (np.float32, TypeError),  # the type instead of a value
    ],
)
def test_wrong_defaults(default, error):
    with pytest.raises(error, match="column 1") as refused:
        decode_csv(["1,2"], [1, default])
    assert error is ValueError or f"such as np.float32(0) or '', got {default!r}" in str(
        refused.value
    )


def test_shape_is_that_of_the_records():
    value, text = decode_csv("1,one", [F32.type(0), ""])
    assert (value, text) == (1, "one")
    assert type(value) is np.float32
    assert type(text) is str
    (square,) = decode_csv([["1", "2"], ["3", "4"]], [0])
    assert square.tolist() == [[1, 2], [3, 4]]
    assert decode_csv(np.array(["1", "2"]), [0])[0].tolist() == [1, 2]
    for empty in ([], np.empty((2, 0), object)):
        columns = decode_csv(empty, [0, "", 1.0])
        assert [c.shape for c in columns] == [np.shape(empty)] * 3
        assert [c.dtype for c in columns] == [I32, object, F32]


def test_records_are_text():
    for records in ([b"1"], [1], np.array([1, 2])):
        with pytest.raises(TypeError, match="must be str"):
            decode_csv(records, [0])


def test_numbers():
    check(["1.0", ".5", "2.", "-1e3", "+4E-1", " 7\t"], [F64.type(0)], [[1, 0.5, 2, -1000, 0.4, 7]])
    check(["-0"], [F64.type(0)], [[0]])
    assert np.signbit(decode_csv(["-0", "-0.0"], [F32.type(0)])[0]).all()
    (odd,) = decode_csv(["nan", "inf", "-INF", "Infinity"], [0.0])
    assert np.isnan(odd[0])
    assert odd[1:].tolist() == [np.inf, -np.inf, np.inf]
    check([" 12 ", "+3", "-0", "007"], [0], [[12, 3, 0, 7]])
    limits = [-(2**31), 2**31 - 1]
    check([str(n) for n in limits], [0], [limits])
    limits = [-(2**63), 2**63 - 1, 999999999999999999, 1000000000000000000]
    check([str(n) for n in limits], [I64.type(0)], [limits])


@pytest.mark.parametrize(
    ("dtype", "field"),
    [(I32, f) for f in ("1.5", "0x10", " ", "1_0", "--1", "+", "1e3", "٣", "1 2", "2147483648")]
    + [(I64, str(2**63)), (I64, "9" * 5000), (I32, "-2147483649")]
    + [(F32, f) for f in ("1.5.1", "e3", "1e", "1e+", ".", "0x1p3", "1_0", "abc", " ", "٣", "+-1")]
    + [(F32, "1e39"), (F32, "3.4028235677973366e38"), (F64, "1e309"), (F64, "-1e999999999")],
)
def test_what_is_no_number(dtype, field):
    fails(["1", "2", field], [required(dtype)], rf"Field 0 in record 2 is not a valid {dtype}: '")
    fails(["1,1", f"{field},1"], [0, dtype.type(0)][::-1], r"Field 0 in record 1 is not a valid")


def test_largest_float32():
    check(["3.4028235677973362e38"], [0.0], [[float(np.finfo(F32).max)]])


def test_long_fields_are_cut_in_messages():
    with pytest.raises(InvalidArgumentError) as caught:
        decode_csv(["x" * 10**6], [0])
    assert len(str(caught.value)) < 200


def test_missing_fields_take_defaults():
    check([",", "1,", ",b"], [7, "d"], [[7, 1, 7], ["d", "d", "b"]])
    check(['"",""'], [7, "d"], [[7], ["d"]])
    check(["NA,NA", "1,x", ",y"], [7, "d"], [[7, 1, 7], ["d", "x", "y"]], na_value="NA")
    check(["-1,5", "1,-1"], [7, 8], [[7, 1], [5, 8]], na_value="-1")
    fails(["1,2", "3,"], [0, required(I32)], "Field 1 is required but missing in record 1")
    fails(["NA"], [required(str)], "Field 0 is required", na_value="NA")
    fails(["2", "1"], [required(I32)], "Field 0 is required but missing in record 1", na_value="1")
    fails(["2", "1"], [required(F32)], "Field 0 is required but missing in record 1", na_value="1")


def test_blanks():
    words = "Field 0 in record 0 is not a valid int32: ' '; blank_is_missing=True treats"
    fails([" ,a"], [7, "d"], words)
    check(["1,  "], [7, "d"], [[1], ["  "]])
    check([" ,a", "2, "], [7, "d"], [[7, 2], ["a", "d"]], blank_is_missing=True)


def test_number_of_fields():
    fails(["1,2", "1,2,3"], [0, 0], "Expect 2 fields but have 3 in record 1")
    fails(["1,2", "1"], [0, 0], "Expect 2 fields but have 1 in record 1")
    fails(["1", ""], [0], "Expect 1 fields but have 0 in record 1")
    fails(["1,"], [0], "Expect 1 fields but have 2 in record 0")
    fails(["1"], [], "Expect 0 fields but have 1")


def test_line_ends():
    check(["\r\n1,2", "\n3,4"], [0, 0], [[1, 3], [2, 4]])
    for record in ("1,2\n", "1\n,2", "1,2\r"):
        fails([record], [0, 0], "Unquoted fields cannot have quotes/CRLFs inside")
        fails([record], [0, 0], "Unquoted fields", use_quote_delim=False)


def test_quotes():
    check(['"a,b","c""d","e\nf",""""'], [""] * 4, [["a,b"], ['c"d'], ["e\nf"], ['"']])
    check(['" 1 ",x', '2,"y z"'], [0, ""], [[1, 2], ["x", "y z"]])
    check(['"a",'], ["", 7], [["a"], [7]])
    check(['"a"'], [""], [["a"]])
    for record in ('a"b', 'a"', ' "a"', '"a" "b"'):
        fails([record], [""], "quote")
    for record in ('"', '"a', '"a,b', '"a""'):
        fails([record], [""], "Quoted field has to end with quote followed by delim or end")
    fails(['"a"b'], [""], "escaped by another quote")
    check(['1,"2"', '"x,3'], ["", ""], [["1", '"x'], ['"2"', "3"]], use_quote_delim=False)


def test_delimiters():
    check(["1\t2"], [0, 0], [[1], [2]], field_delim="\t")
    check(["1 2"], [0, 0], [[1], [2]], field_delim=" ")
    check(["152"], [0, 0], [[1], [2]], field_delim="5")
    check(["1é2"], [0, 0], [[1], [2]], field_delim="é")
    for delimiter in ("", ",,", "\n", "\r", '"'):
        with pytest.raises(ValueError, match="field_delim"):
            decode_csv(["1"], [0], field_delim=delimiter)
    check(['1"2'], [0, 0], [[1], [2]], field_delim='"', use_quote_delim=False)


def test_select_cols():
    records = ["1,x,3.5,9", '4,"y,z",6.5,9']
    check(records, [0, 0.0], [[1, 4], [3.5, 6.5]], select_cols=[0, 2])
    check(records, [0], [[9, 9]], select_cols=[3])
    check(records, [""], [["x", "y,z"]], select_cols=(1,))
    fails(["1,2,3", "1,2"], [0, 0], "Expect 2 fields but have 1 in record 1", select_cols=[1, 2])
    fails(['1,a"b'], [0], "Unquoted", select_cols=[0])
    fails(["1,a\rb"], [0], "Unquoted", select_cols=[0])
    for wrong in ([0], [0, 0], [1, 0], [-1, 0]):
        with pytest.raises(ValueError, match="select_cols"):
            decode_csv(records, [0, 0], select_cols=wrong)


def test_keys_name_the_record():
    lines = [",".join(["1"] * 65)] * 3 + [",".join(["1"] * 64)]
    keys = [f"data/train-0.csv:{n}" for n in range(14, 18)]
    message = r"^Expect 65 fields but have 64 in record 3 \(data/train-0.csv:17\)$"
    fails(lines, [0] * 65, message, keys=keys)
    fails(["1,x"], [0, 0], r"Field 1 in record 0 is not a valid int32: 'x' \(f:9\)$", keys=["f:9"])
    header = r"Field 1 in record 0 is not a valid int32: 'x'; skip_header_lines=1 skips .* \(f:1\)$"
    fails(["1,x"], [0, 0], header, keys=["f:1"])
    fails([","], [0, required(I32)], r"missing in record 0 \(f:9\)$", keys=["f:9"])
    with pytest.raises(ValueError, match="expected 4 keys"):
        decode_csv(lines, [0] * 65, keys=keys[:3])


def test_the_first_bad_record_is_named():
    good = ["1,2"] * 100
    fails([*good, "x,2", "1", "y,3"], [0, 0], "record 100 ")


def test_skipping_records():
    records = ["1,2", "x,3", "4", "5,6", '"', "7,8"]
    check(records, [0, 0], [[1, 5, 7], [2, 6, 8]], on_damage="skip")
    check(records[:1], [0, 0], [[1], [2]], on_damage="skip")
    check(["x", ""], [0], [[]], on_damage="skip")
    check([["1", "x"], ["y", "2"]], [0.0], [[1, 2]], on_damage="skip")
    check(["a,1", "b", "c,3"], ["", 0], [["a", "c"], [1, 3]], on_damage="skip")
    check([], [0], [[]], on_damage="skip")
    with pytest.raises(ValueError, match="on_damage"):
        decode_csv(["1"], [0], on_damage="ignore")


def test_missing_fields_by_column():
    """Columns that are decoded at once take the same defaults as single fields."""
    rows = ["1,2.5,a", ",,", "NA,NA,NA", "3,nan,NAN"]
    numbers, floats, texts = decode_csv(rows, [7, 0.1, "d"], na_value="NA")
    assert numbers.tolist() == [1, 7, 7, 3]
    assert floats[:3].tolist() == [2.5, F32.type(0.1), F32.type(0.1)]
    assert np.isnan(floats[3])
    assert texts.tolist() == ["a", "d", "d", "NAN"]
    odd, _ = decode_csv(["1,", ",", "3,"], [np.float64("nan"), 0])
    assert np.isnan(odd[1])
    assert odd[[0, 2]].tolist() == [1, 3]
    limits = [I64.type(-(2**63)), I64.type(2**63 - 1)]
    check([",", "1,2"], limits, [[-(2**63), 1], [2**63 - 1, 2]])


NUMBERS = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.integers(-200, 200).map(str),
    st.floats(width=32).map(repr),
    st.floats().map(repr),
    st.from_regex(r"[+-]?[0-9]{0,22}\.?[0-9]{0,22}([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(["", " ", "NA", '"1"', '"', "1.", ".", "-", "+0", "1e", "é", "\n", "\r", "1 "]),
)
KINDS = st.sampled_from([F32, F64, I32, I64])


def outcome(*args, **options):
    try:
        columns = decode_csv(*args, **options)
    except InvalidArgumentError as error:
        return str(error)
    return [(column.dtype, column.tobytes()) for column in columns]


@pytest.mark.parametrize("way", ["compiled"], indirect=True)  # it takes both itself
@settings(max_examples=400, derandomize=True)
@example(["9007199254740993,1e22"], [F64, F64], "", False, None)
@example(["3e23,2e-23"], [F64, F64], "", False, None)  # 10**23 is no float64
@example(["14134128639960045e-5"], [F64], "", False, None)  # two roundings would differ
@given(
    rows=st.lists(st.lists(NUMBERS, min_size=1, max_size=4).map(",".join), max_size=5),
    dtypes=st.lists(KINDS, min_size=1, max_size=3),
    na_value=st.sampled_from(["", "NA", "1", "-"]),
    needed=st.booleans(),
    select=st.none() | st.just([0, 2, 3]),
)
def test_both_ways_agree_on_anything(rows, dtypes, na_value, needed, select):
    _both_ways(rows, dtypes, na_value, needed, select)


@pytest.mark.parametrize("way", ["compiled"], indirect=True)  # it takes both itself
@settings(max_examples=200, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda v: f"{v:.6g}"),
            st.decimals(-(10**6), 10**6, places=4).map(str),
            st.integers(-(2**31), 2**31 - 1).map(str),
            st.integers(-(2**63), 2**63 - 1).map(str),
        ).map(",".join),
        max_size=20,
    )
)
def test_both_ways_agree_on_numbers(rows):
    _both_ways(rows, [F32, F64, I32, I64], "", False, None)


@pytest.mark.parametrize("way", ["exact"], indirect=True)
@settings(max_examples=400, derandomize=True)
@given(
    rows=st.lists(st.lists(NUMBERS, min_size=1, max_size=3).map(",".join), min_size=1, max_size=5),
    defaults=st.lists(
        st.sampled_from([F32.type(0.1), F64.type(-2), I32.type(7), I64.type(-7), "d"])
        | KINDS.map(required),
        min_size=1,
        max_size=3,
    ),
    na_value=st.sampled_from(["", "NA", "1", "-"]),
    blanks=st.booleans(),
)
def test_by_column_and_by_record_agree(rows, defaults, na_value, blanks):
    options = {"na_value": na_value, "blank_is_missing": blanks}
    together = outcome(rows, defaults, **options)
    one_by_one = [outcome([row], defaults, **options) for row in rows]
    errors = [result for result in one_by_one if isinstance(result, str)]
    if errors:
        assert isinstance(together, str)
        assert together.split("record")[0] == errors[0].split("record")[0]
        return
    for column, (dtype, data) in enumerate(together):
        parts = [result[column] for result in one_by_one]
        assert {part[0] for part in parts} == {dtype}
        if dtype.kind != "O":
            assert data == b"".join(part[1] for part in parts)


def _both_ways(rows, dtypes, na_value, needed, select):
    defaults = [required(dtype) if needed else dtype.type(7) for dtype in dtypes]
    options = {"na_value": na_value, "keys": [f"file:{n}" for n in range(len(rows))]}
    if select:
        options["select_cols"] = select[: len(dtypes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "_fields_before_loop", 1 << 62)
        exact = outcome(rows, defaults, **options)
        patch.setattr(parser, "_fields_before_loop", 0)
        assert outcome(rows, defaults, **options) == exact


def test_the_loop_starts_after_some_work(monkeypatch):
    from strategies.input.csv import kernel

    calls = []
    monkeypatch.setattr(kernel, "parse", lambda *_: calls.append(1))
    monkeypatch.setattr(parser, "_fields_before_loop", 5)
    for expected in (0, 0, 1, 2):
        check(["1,2,3"], [0, 0, 0], [[1], [2], [3]])
        assert len(calls) == expected
