"""Schedules with one wrong step, where there are more than 16 ranks.

Each takes a function of `collectives.core.topology` and returns one that stands for it.
"""


def wrong_halving(halving):
    def steps(rank, size):
        for number, step in enumerate(halving(rank, size)):
            wrong = size > 16 and number == 1 and rank == 5
            yield step._replace(dest=(step.dest + 1) % size) if wrong else step

    return steps


def wrong_tree(tree):
    def place(rank, size, root):
        found = tree(rank, size, root)
        if size > 16 and rank == (root + 16) % size:
            return found._replace(parent=(found.parent + 1) % size)
        return found

    return place


def wrong_ring(around):
    def steps(rank, size):
        for number, step in enumerate(around(rank, size)):
            wrong = size > 16 and number == 15
            yield step._replace(send=step.receive, receive=step.send) if wrong else step

    return steps


def wrong_double_tree(double_tree):
    def places(rank, size, root):
        one, other = double_tree(rank, size, root)
        if size > 16 and rank == (root + 15) % size:
            other = other._replace(parent=(other.parent + 1) % size)
        return one, other

    return places


def wrong_doubling(doubling):
    def part(rank, size):
        found = doubling(rank, size)
        if size > 16 and rank == 8:
            return found._replace(partners=found.partners[:2] + found.partners[1:3])
        return found

    return part


def wrong_rails(rails):
    def place(leaders, rank):
        found = rails(leaders, rank)
        if len(leaders) > 16 and rank == 3:
            *others, last, again = found.rail
            return found._replace(rail=(*others, again, last))
        return found

    return place


def wrong_neighbours(neighbours):
    def both(rank, size, step=1):
        left, right = neighbours(rank, size, step)
        return (left, (right + 1) % size) if rank == 3 and step == 16 else (left, right)

    return both


def wrong_prefix(prefix):
    def steps(rank, size):
        for number, step in enumerate(prefix(rank, size)):
            wrong = size > 16 and number == 4 and step.dest == size - 1
            yield step._replace(dest=size - 2) if wrong else step

    return steps
