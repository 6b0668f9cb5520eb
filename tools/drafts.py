"""--show-tree: what each step drafted, and what the model accepted of it."""

from collections import Counter

from clover import Tree

SHOWN = 4   # trees that are printed
WIDTH = 44  # of a node and what is left of it


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
        """Adds a result of `Engine.step` to `steps`."""
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
            yield from tree_lines(step)
            if step["guessed_by"][-1:] == ["model"]:
                yield f"+ {step['emitted'][-1]!r}"


def tree_lines(step):
    """A line for each node, below its parent and further to the right."""
    paths = [(0,)]
    for node, parent in enumerate(step["parents"][1:], start=1):
        paths.append((*paths[parent], node))
    for *above, node in sorted(paths):
        mark = "*" if node in step["path"][1:] else " "
        words = "   " * len(above) + repr(step["nodes"][node])
        drafter = step["drafted_by"][node].replace("root", "the newest token")
        yield f"{mark} {words:<{WIDTH}}  {drafter}"
