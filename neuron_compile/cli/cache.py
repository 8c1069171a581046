"""stub until the cache is merged"""

from .environment import Finding


def add(commands):
    pass


def findings() -> list[Finding]:
    return []
