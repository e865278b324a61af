"""Dicts that forget the oldest."""

from cp_dispatch.bounded import keep


def test_the_oldest_goes():
    known = {}
    for i in range(5):
        keep(known, i, str(i), 3)
    assert known == {2: "2", 3: "3", 4: "4"}
    keep(known, 2, "again", 3)  # nothing has to go for what is there
    assert known == {2: "again", 3: "3", 4: "4"}
    keep(known, 9, "9", 1)
    assert known == {9: "9"}
