# SPDX-License-Identifier: Apache-2.0
"""Play `connect_four.py` by Monte Carlo tree search, and print the rate of won games by budget.

python tree_search.py http://127.0.0.1:21000 [GAMES]

The search knows no rules of the game: it returns to a checkpoint of the session, tries actions from
there, and counts which of them end well. The random numbers of the session continue alike each
time, so it also sees what this opponent would do.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field

from connect_four import free_columns

from openenvd.client import Session, StepResult

BUDGETS = (1, 4, 16)  # games that are tried before each action
EXPLORATION = 1.4  # the constant of UCT; Kocsis and Szepesvári, 2006


@dataclass
class Node:
    """A state, by the actions that lead to it."""

    visits: int = 0
    value: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)

    def choose(self, actions: list[int]) -> int:
        """Return an action that was not tried, or the most promising one."""
        for action in actions:
            if action not in self.children:
                return action

        def bound(action: int) -> float:
            child = self.children[action]
            rest = math.sqrt(math.log(self.visits) / child.visits)
            return child.value / child.visits + EXPLORATION * rest

        return max(actions, key=bound)


def search(session: Session, result: StepResult, budget: int, rng: random.Random) -> int:
    """Return the best action in the session's present state, to which it returns."""
    root, start = Node(), session.checkpoint()
    for _ in range(budget):
        node, path, at = root, [root], result
        is_known = True
        while not at.done:
            actions = free_columns(at.observation["columns"])
            rng.shuffle(actions)
            action = node.choose(actions) if is_known else actions[0]  # beyond the tree: any
            at = session.step({"column": action})
            if is_known:
                is_known = action in node.children
                node = node.children.setdefault(action, Node())
                path.append(node)
        for node in path:
            node.visits += 1
            node.value += at.reward or 0.0
        session.restore(start)
    return max(root.children, key=lambda action: root.children[action].visits)


def play(address: str, seed: int, budget: int) -> bool:
    """Play a game, and return whether it was won."""
    rng = random.Random(seed)  # noqa: S311  # a game is no secret
    with Session(address) as session:
        result = session.reset(seed=seed)
        while not result.done:
            result = session.step({"column": search(session, result, budget, rng)})
    return bool(result.observation["winner"] == 1)


def main(address: str, games: int) -> None:
    """Print a bar of won games for each budget."""
    for budget in BUDGETS:
        won = sum(play(address, seed, budget) for seed in range(games))
        print(f"budget {budget:3}: {'#' * won}{'.' * (games - won)} {won / games:.0%}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
