"""Several guesses in one tree: paths that begin alike share nodes."""

from collections.abc import Sequence

from outrider.eval.trees.tree import Tree


class PathTree:
    """A draft tree made path by path; a token is never twice under one node."""

    def __init__(self, root: int) -> None:
        self._tokens, self._parents = [root], [-1]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int], under: int = 0) -> list[int]:
        """Hang a path under a node; returns the nodes of its tokens, old or new."""
        nodes: list[int] = []
        for token in tokens:
            node = self._child.get((under, token))
            if node is None:
                node = self._child[under, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(under)
            nodes.append(node)
            under = node
        return nodes

    def add_tree(self, other: Tree) -> list[int]:
        """Hang all of another tree of the same root; returns its nodes' numbers here."""
        nodes = [0]
        for token, parent in zip(other.tokens[1:], other.parents[1:], strict=True):
            nodes += self.add((token,), nodes[parent])
        return nodes

    def tree(self) -> Tree:
        """The tree so far."""
        return Tree(tuple(self._tokens), tuple(self._parents))
