"""What happens beside each other, drawn from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from canvas import Canvas

_SECOND = 62  # pixels of one second


def engine() -> Canvas:
    """Draw one round of the node engine between two ranks."""
    canvas = Canvas(
        760,
        250,
        "A round of the node engine: two ranks, one large array",
        "Each rank copies the chunk that the other owns into its own slot and says FILLED. When "
        "both have said so, each adds the other's slot to its own chunk, writes the sum to its "
        "slot and says READY; then each takes the other's sum. No message is sent.",
    )
    steps = ("fill", "wait", "combine", "wait", "take")
    widths = (130, 70, 170, 70, 130)
    texts = (
        ("b0 to slot 0", "FILLED?", "a0 + slot 1\nto slot 0", "READY?", "b from slot 1"),
        ("a1 to slot 1", "FILLED?", "slot 0 + b1\nto slot 1", "READY?", "a from slot 0"),
    )
    for rank, row in enumerate(texts):
        x, y = 100, 90 + 80 * rank
        canvas.text(20, y + 26, f"rank {rank}")
        for step, width, text in zip(steps, widths, row, strict=True):
            if not rank:
                canvas.text(x + width / 2, 66, step, "soft middle")
            canvas.box(x, y, width - 8, 44, text, "empty" if step == "wait" else f"h{rank}")
            x += width
    for x in (230, 470):
        canvas.arrow(x - 4, 132, x + 22, 168)
        canvas.arrow(x - 4, 172, x + 22, 136)
    canvas.text(
        100, 236, "Every arrow is a word in shared memory that only its rank writes.", "soft"
    )
    return canvas


def pipeline() -> Canvas:
    """Draw the way from files to steps."""
    canvas = Canvas(
        760,
        230,
        "From files to batches",
        "Names of files go through a queue to reader threads. These put records into a shuffling "
        "queue, from which batches are made, which the training loop takes. Each queue holds back "
        "those before it when it is full, and those after it when it is empty.",
    )
    boxes = [
        (20, 86, 96, "files", "empty"),
        (146, 86, 110, "queue of\nnames", "h0"),
        (292, 56, 110, "reader\nthread", "h2"),
        (292, 120, 110, "reader\nthread", "h2"),
        (438, 86, 120, "shuffling\nqueue", "h0"),
        (592, 86, 70, "batch", "h1"),
    ]
    for x, y, width, text, kind in boxes:
        canvas.box(x, y, width, 48, text, kind)
    canvas.text(686, 115, "step")
    for line in (
        (118, 110, 144, 110),
        (258, 104, 290, 82),
        (258, 116, 290, 142),
        (404, 82, 436, 104),
        (404, 142, 436, 116),
        (560, 110, 590, 110),
        (664, 110, 684, 110),
    ):
        canvas.arrow(*line)
    canvas.text(
        20, 200, "The end of the files closes the first queue; each closes the next, and an", "soft"
    )
    canvas.text(20, 217, "error in any thread reaches the loop.", "soft")
    return canvas


def waiting() -> Canvas:
    """Draw three workers under four ways of keeping in step."""
    seconds = ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (1.2, 1.2, 1.2, 1.2, 1.2), (1.6, 3.0, 1.6))
    end = 6.4
    canvas = Canvas(
        640,
        560,
        "Three workers, one of them slow",
        "In synchronous training every step lasts as long as the slowest worker's. With one spare "
        "replica a step ends when two of three gradients are there; the slow worker's is dropped "
        "and it goes on with newer values. With an asynchronous parameter server nobody waits: "
        "each gradient is applied when it comes, and may be stale.",
    )
    stories = (
        ("synchronous: a step needs all three", _together(seconds, 3, end)),
        ("one spare replica: a step needs two of three", _together(seconds, 2, end)),
        ("asynchronous parameter server: every gradient counts", _alone(seconds, end)),
    )
    for number, (name, (workers, steps)) in enumerate(stories):
        top = 58 + 164 * number
        canvas.text(20, top + 10, name)
        for worker, pieces in enumerate(workers):
            y = top + 24 + 36 * worker
            canvas.text(20, y + 19, f"worker {worker}", "soft small")
            for begin, finish, counts in pieces:
                shape = (100 + begin * _SECOND, y, (finish - begin) * _SECOND - 3, 28)
                canvas.box(*shape, "" if counts else "late", f"h{worker}" if counts else "empty")
        for step in steps:
            x = 100 + step * _SECOND - 1
            canvas.line(x, top + 20, x, top + 134, "line dashed")
    canvas.text(
        20,
        548,
        "Dashed: new values. Empty: a gradient that comes too late and is dropped.",
        "soft small",
    )
    return canvas


Pieces = list[list[tuple[float, float, bool]]]


def _together(
    seconds: Sequence[Sequence[float]], needed: int, end: float
) -> tuple[Pieces, list[float]]:
    """Return what each worker computes when, whether it counts, and when the steps end."""
    workers: Pieces = [[] for _ in seconds]
    free = [0.0] * len(seconds)
    made = [0] * len(seconds)
    steps: list[float] = []
    now = 0.0
    while True:
        began = [max(free[w], now) for w in range(len(seconds))]
        # Who is still at an older step comes too late with it, and begins this one afterwards.
        last = [seconds[w][made[w] % len(seconds[w])] for w in range(len(seconds))]
        ends = sorted(began[w] + last[w] for w in range(len(seconds)))
        done = ends[needed - 1]
        if done > end:
            return workers, steps
        for w in range(len(seconds)):
            if began[w] >= done:
                continue
            finish = began[w] + last[w]
            counts = finish <= done
            workers[w].append((began[w], min(finish, end), counts))
            free[w] = finish
            made[w] += 1
        steps.append(done)
        now = done


def _alone(seconds: Sequence[Sequence[float]], end: float) -> tuple[Pieces, list[float]]:
    """Return the same where nobody waits for anybody."""
    workers: Pieces = []
    steps = []
    for own in seconds:
        pieces, now, number = [], 0.0, 0
        while now + own[number % len(own)] <= end:
            finish = now + own[number % len(own)]
            pieces.append((now, finish, True))
            steps.append(finish)
            now, number = finish, number + 1
        workers.append(pieces)
    return workers, sorted(steps)
