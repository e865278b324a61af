"""What the replacements of torch's functions have in common."""


class StaticMethod:
    """A static method of a class of torch's, for reading, replacing, restoring."""

    def __init__(self, owner: type, name: str):
        self._owner, self._name = owner, name
        self._before = self._put = None

    def get(self):
        return getattr(self._owner, self._name)

    def put(self, function) -> None:
        self._before, self._put = self._owner.__dict__[self._name], function
        setattr(self._owner, self._name, staticmethod(function))

    def restore(self) -> None:
        if self._put is not None and self.get() is self._put:
            setattr(self._owner, self._name, self._before)
        self._before = self._put = None
