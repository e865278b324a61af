"""Dicts that evict the oldest entry."""

from cp_dispatch.bounded import ByWeight, keep


def test_the_oldest_goes():
    known = {}
    for i in range(5):
        keep(known, i, str(i), 3)
    assert known == {2: "2", 3: "3", 4: "4"}
    keep(known, 4, "again", 3)  # an existing key evicts nothing
    assert known == {2: "2", 3: "3", 4: "again"}
    keep(known, 9, "9", 1)
    assert known == {9: "9"}


def test_another_thread_may_put_one_meanwhile():
    class Raced(dict):
        others = ["other"]

        def __iter__(self):
            found = super().__iter__()
            if self.others:
                self[self.others.pop()] = "of another thread"
            return found

    known = Raced(a="a", b="b")
    keep(known, "c", "c", 2)
    assert dict(known) == {"other": "of another thread", "c": "c"}


def test_the_newest_up_to_a_weight():
    made = []

    def make(size: int, name: str) -> str:
        made.append(name)
        return name * size

    found = ByWeight(make, len, most=5)
    assert [found(2, "a"), found(2, "b"), found(2, "a")] == ["aa", "bb", "aa"]
    assert made == ["a", "b"]
    found(3, "c")  # evicts the oldest
    found(2, "b")
    assert made == ["a", "b", "c"]
    assert found(9, "d") == found(9, "d") == "d" * 9  # too heavy by itself, but kept anyway
    assert made == ["a", "b", "c", "d"] and len(found._known) == 1
    found(1, "e")
    assert found._total == 1 and len(found._known) == 1
