"""--show-tree: what each step drafted, and what the model accepted of it."""

import sys
from collections import Counter

from clover import Tree

SHOWN = 4   # trees that are printed
WIDTH = 44  # of a node with its branches


class Drafts:
    """Records the tree of every step of an engine, as a dict for --json, in `steps`. The engine
    runs without a graph, and no step ahead."""

    def __init__(self, engine, session):
        self.decoder = engine.decoder
        self.decoder.steps_ahead = 0
        self.decode = session.encoding.decode
        self.streams = [session.encoding.stream() for _ in session.texts]
        self.trees = {}          # index of the prompt -> the tree of its last step
        self.counts = Counter()  # index of the prompt -> its steps
        self.steps = []
        self.draft = self.decoder.draft
        self.decoder.draft = self.record

    def record(self, plan):
        """Takes the place of Decoder.draft."""
        tree = self.draft(plan)
        slots = self.decoder.slots
        columns = slots.sequence, slots.active, *tree
        for index, active, *nodes in zip(*(column.tolist() for column in columns)):
            if active:
                self.trees[index] = Tree(*nodes)
        return tree

    def show(self, sequence, tokens, path, plan):
        """Adds a result of `Engine.step` to `steps`. The last emitted token is the model's own,
        unless the text ended before it."""
        index = sequence.index
        tree = self.trees[index]
        self.counts[index] += 1
        used = [node for node, bits in enumerate(tree.ancestors) if bits]  # spare nodes have none
        number = {node: i for i, node in enumerate(used)}

        def drafter(node):
            if node > plan.head_nodes:
                return "lookup"
            return f"head {tree.depths[node]}" if node else "root"

        path = path[:len(tokens) + 1]  # a text may end inside it
        self.steps.append(dict(
            prompt=index, step=self.counts[index], plan=str(plan),
            emitted=[self.streams[index].feed([token]) for token in tokens],
            guessed_by=[*map(drafter, path[1:]), "model"][:len(tokens)],
            nodes=[self.decode([tree.tokens[node]]) for node in used],
            drafted_by=list(map(drafter, used)),
            parents=[number[tree.parents[node]] if node else -1 for node in used],
            path=[number[node] for node in path]))

    def lines(self):
        """The first trees as text."""
        trees = [step for step in self.steps if len(step["nodes"]) > 1]
        for step in trees[:SHOWN]:
            prompt = f"prompt {step['prompt'] + 1}, " if len(self.streams) > 1 else ""
            yield (f"\n{prompt}step {step['step']}, {step['plan']}; * accepted, + added by the "
                   "model itself")
            yield from branch(step, 0, "", "")
            if step["guessed_by"][-1:] == ["model"]:
                yield f"+ {step['emitted'][-1]!r}"
        if not trees:
            yield "\nno step drafted a tree; --tree-size 9 lets every step draft one"


def branch(step, node, before, below):
    """The lines of a node and of those under it. before: what its own line begins with; below: what
    theirs do. A chain of lookup's is one line."""
    chain = [node]
    children = children_of(step, node)
    while step["drafted_by"][chain[-1]] == "lookup" and len(children) == 1:
        chain += children
        children = children_of(step, chain[-1])
    accepted = sum(at in step["path"][1:] for at in chain)
    words = " ".join(repr(step["nodes"][at]) for at in chain)
    by = step["drafted_by"][node].replace("root", "the newest token")
    by += f", {accepted} of {len(chain)} accepted" if len(chain) > 1 else ""
    yield f"{'*' if accepted else ' '} {before + words:<{WIDTH}}  {by}"
    utf = "UTF" in (sys.stdout.encoding or "").upper()
    end, fork, line = ("└─ ", "├─ ", "│  ") if utf else ("`- ", "|- ", "|  ")
    for child in children:
        mark, rest = (end, "   ") if child == children[-1] else (fork, line)
        yield from branch(step, child, below + mark, below + rest)


def children_of(step, node):
    return [child for child, parent in enumerate(step["parents"]) if parent == node]
