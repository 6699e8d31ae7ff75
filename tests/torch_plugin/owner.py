"""A group of one parameter of the CPU's, by the extension alone, without FSDP: what the core asks of it."""

from fcdp import _fcdp


def word(number):
    return number.to_bytes(8, "little")


class Owner:
    """In place of group.Group. It is gathered once, and its shard is read by nobody."""

    in_c = False  # Python says what its shards are

    def __init__(self, handle, shard):
        self.handle, self.shard = handle, shard
        handle.set_owner(self, ["weight"])

    def settle(self):
        pass

    def look(self, what):
        return (word(0), word(0), word(1), word(0), False), 8 * word(0), (True, False, 0)

    def make_inputs(self, stale, side):
        return word(self.shard.data_ptr()), None

    def carry(self, votes):
        return votes

    def written(self):
        return False

    def unshard(self, tree):
        self.handle.unshard(tree, _fcdp.PASS_OTHER, True, 0, 0, None)
