"""Who trains and who is spare, whoever dies: by ranks that each decide for themselves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.elastic.assignment import RankReport, assign_roles


def test_the_first_ranks_train_while_all_have_a_commit():
    reports = [RankReport(0, {0: (rank, 5)}) for rank in range(5)]
    assert assign_roles(reports, most=3) == ([0, 1, 2], {})


def test_the_newest_commit_counts_of_which_a_rank_is_sure():
    """Ranks 0 and 2 are not sure of it; their places are those that they had as it was made."""
    reports = [
        RankReport(6, {6: (2, 4), 7: (1, 3)}),
        RankReport(7, {7: (0, 3), 6: (0, 4)}),
        RankReport(6, {6: (3, 4), 7: (2, 3)}),
    ]
    assert assign_roles(reports, most=4) == ([1, 0, 2], {})
    assert assign_roles([RankReport(6, {6: (2, 4)}), RankReport(-1, {})], most=1) == ([0], {})


def test_who_has_the_first_commit_and_is_not_sure_of_it_keeps_its_place():
    """Rank 0 has heard of a death between its copy and the news that all have one."""
    reports = [RankReport(-1, {0: (0, 3)}), RankReport(0, {0: (2, 3)}), RankReport(-1, {})]
    assert assign_roles(reports, most=3) == ([0, 2, 1], {2: 1})


def test_spare_ranks_alone_have_nothing_to_go_on_from():
    assert assign_roles([RankReport(-1, {}), RankReport(-1, {})], most=2) is None


@settings(max_examples=300)
@given(
    most=st.integers(1, 5),
    spares=st.integers(0, 4),
    deaths=st.lists(st.sets(st.integers(0, 8), max_size=3), max_size=5),
)
def test_places_stay_taken_as_long_as_anybody_lives_to_take_them(most, spares, deaths):
    living = dict.fromkeys(range(most + spares))  # number at the start -> place, None if spare
    living |= {number: number for number in range(most)}
    for number, dead in enumerate(deaths):
        before = len([place for place in living.values() if place is not None])
        living = {who: place for who, place in living.items() if who not in dead}
        reports = [
            RankReport(-1, {}) if place is None else RankReport(number, {number: (place, before)})
            for place in living.values()
        ]
        if all(place is None for place in living.values()):
            assert not reports or assign_roles(reports, most) is None
            return
        ranks, admitted = assign_roles(reports, most)
        assert len(ranks) == min(most, len(living))
        assert ranks == sorted(set(ranks), key=ranks.index)
        now = {rank: place for rank, place in enumerate(living.values()) if place is not None}
        assert now.keys().isdisjoint(admitted)
        everyone = now | admitted
        assert set(everyone) == set(ranks)
        assert len(set(everyone.values())) == len(ranks)
        if len(ranks) == before:  # as many as before: each in its place, or in that of a dead one
            assert [everyone[rank] for rank in ranks] == list(range(before))
        place_of = {rank: place for place, rank in enumerate(ranks)}
        living = {who: place_of.get(rank) for rank, who in enumerate(living)}
