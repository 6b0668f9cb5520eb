"""Triton kernels that build and accept trees. Functions of the same names, arguments and results
are in clover.py (extend_candidates, build_tree) and generate.py (ngram_lookup, accept_path,
advance): a launch does what takes them tens of torch operations. They run where Triton does not.
Nothing is checked: `gpu.GraphDecoder` calls them with its own tensors.

    prompt_chain   the tree of a prompt's next tokens, which a step reads like a draft

Letters: B sequences, T tree nodes, P nodes of a path, K depths and W beams of a draft, n candidates
of a depth or tokens of a chain, S capacity of the history, C hidden size."""

import torch

import clover
import generate
from clover import BINS, SCHEMA, SOURCES, Candidates, Tree
from engine.acceptance import count_nodes
from generate import Accepted
from kernels import (
    NO_TOKEN,
    contiguous,
    launch,
    pack_entries,
    runs_triton,
    slot_of,
    sortable,
    tl,
    triton,
)

# --------------------------------------------------------------------------------------------------
# extend_candidates
#
# An entry's place is the number of entries before it, from a comparison of all pairs at once.

@triton.jit
def _places(rank, token, entries_ptr, BLOCK_J: tl.constexpr):
    """The number of entries before each: higher rank first, then lower token, then lower index.
    entries_ptr: scratch of 2 N int64, through which threads read each other's entries."""
    N: tl.constexpr = rank.shape[0]
    index = tl.arange(0, N)
    key = token * N + index
    tl.store(entries_ptr + index, rank)
    tl.store(entries_ptr + N + index, key)
    tl.debug_barrier()
    place = tl.zeros([N], tl.int32)
    for start in range(0, N, BLOCK_J):
        others = entries_ptr + start + tl.arange(0, BLOCK_J)[None, :]
        ranks = tl.load(others)
        before = (ranks == rank[:, None]) & (tl.load(others + N) < key[:, None])
        place += tl.sum((before | (ranks > rank[:, None])).to(tl.int32), 1)  # [N, BLOCK_J]
    return place


@triton.jit(do_not_specialize=["stride_b", "stride_w", "proposals", "n", "W", "K", "depth"])
def _extend_candidates_kernel(
    logprobs_ptr, proposed_ptr, joint_ptr, tokens_ptr, parents_ptr, stride_b, stride_w,
    proposals, n, W, K, depth, entries_ptr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """Program b: the proposals of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    valid = column < proposals
    offsets = b * stride_b + (column // W).to(tl.int64) * stride_w + column % W
    token = tl.load(proposed_ptr + offsets, mask=valid, other=NO_TOKEN)
    logprob = tl.load(logprobs_ptr + offsets, mask=valid, other=float("-inf"))
    joint = tl.where(logprob > 0, 0.0, tl.where(logprob <= 0, logprob, float("-inf")))  # NaN: -inf
    out = (b * K + depth) * n
    beams_ptr = joint_ptr + out - n
    joint += tl.load(beams_ptr + column // W, mask=valid & (depth > 0), other=0.0)  # root: 0
    place = _places(sortable(joint).to(tl.int64), token, entries_ptr + b * 2 * BLOCK_N, BLOCK_J)
    mask = place < n
    out += place
    tl.store(joint_ptr + out, joint, mask=mask)
    tl.store(tokens_ptr + out, tl.where(valid, token, 0), mask=mask)
    tl.store(parents_ptr + out, tl.where(valid, column // W, -1).to(tl.int64), mask=mask)


def extend_candidates(logprobs, tokens, candidates, depth):
    if not runs_triton(logprobs):
        return clover.extend_candidates(logprobs, tokens, candidates, depth)
    B, w, W = logprobs.shape
    _, K, n = candidates.joint.shape
    proposals = W * W if depth else W
    launch(_extend_candidates_kernel, (B,), logprobs.contiguous(), tokens.contiguous(),
           *candidates, w * W, W if w > 1 else 0, proposals, n, W, K, depth,
           **_pair_blocks(max(proposals, n), tokens))


def _pair_blocks(n, tokens):
    """Scratch memory and launch options for comparing n entries of each sequence pairwise."""
    BLOCK_N = max(64, triton.next_power_of_2(n))
    return dict(entries_ptr=tokens.new_empty(len(tokens), 2, BLOCK_N), BLOCK_N=BLOCK_N,
                BLOCK_J=min(16, 8192 // BLOCK_N),
                num_warps=min(max(BLOCK_N // 32, 4), 16))  # 8 to 16 pairs per thread


# --------------------------------------------------------------------------------------------------
# ngram_lookup
#
# Bytes: 4 * length per sequence, read once by a single program.

@triton.jit(do_not_specialize=["S", "n"])
def _ngram_lookup_kernel(history_ptr, lengths_ptr, slots_ptr, chain_ptr, S, n,
                         BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program b: the chain of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    history_ptr += slot * S
    last = tl.load(lengths_ptr + slot)  # the newest token's index
    best = tl.zeros([BLOCK_S], tl.int32)  # the length of a match, << 28, plus its last index
    for start in range(0, last, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        matched = index < last
        length = tl.zeros([BLOCK_S], tl.int32)
        for i in tl.static_range(4):  # the suffix, from its newest token back
            token = tl.load(history_ptr + last - i, mask=last >= i, other=-1)
            mask = matched & (index >= i)
            matched &= tl.load(history_ptr + index - i, mask=mask, other=-2) == token
            length += matched.to(tl.int32)
        best = tl.maximum(best, tl.where(length > 0, (length << 28) + index, 0))
    found = tl.max(best, 0)
    match = found & 0xFFFFFFF
    chain_ptr += b * (n + 1)
    step = tl.arange(0, BLOCK_N)
    source = match + 1 + step % tl.maximum(last - match, 1)
    token = tl.load(history_ptr + source, mask=(step < n) & (found > 0), other=-1)
    tl.store(chain_ptr, (found >> 28).to(tl.int64))
    tl.store(chain_ptr + 1 + step, token.to(tl.int64), mask=step < n)


def ngram_lookup(history, lengths, n, slots=None):
    if not runs_triton(history):
        return generate.ngram_lookup(history, lengths, n, slots)
    S = history.shape[1]
    B = len(lengths if slots is None else slots)
    chain = history.new_empty(B, 1 + n, dtype=torch.int64)
    inputs = map(contiguous, (history, lengths, slots))
    launch(_ngram_lookup_kernel, (B,), *inputs, chain, S, n,
           BLOCK_S=4096, BLOCK_N=triton.next_power_of_2(n), num_warps=8)
    return chain


# --------------------------------------------------------------------------------------------------
# build_tree

@triton.jit(do_not_specialize=["root_at", "n", "n_chain", "T"])
def _build_tree_kernel(
    root_ptr, joint_ptr, tokens_ptr, parents_ptr, chain_ptr, chances_ptr, temperature_ptr,
    tree_ptr, probabilities_ptr, root_at, n, n_chain, T, entries_ptr,
    BINS: tl.constexpr, SOURCES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """Program b: the tree of one sequence. Columns: the heads' candidates, the root, the chain;
    root_at: the root's."""
    b = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, 64)
    chances_ptr += tl.where(tl.load(temperature_ptr + b) > 0, SOURCES, 0)
    chances = tl.load(chances_ptr + bins, mask=bins < SOURCES, other=0.0)
    chances = tl.where(chances > 0, tl.minimum(chances, 1.0), 0.0)  # NaN is 0
    column = tl.arange(0, BLOCK_N)
    is_root = column == root_at
    depth = tl.where(column < root_at, column // n + 1, column - root_at)
    offsets = b * root_at + column
    beam = tl.load(parents_ptr + offsets, mask=column < root_at, other=-1).to(tl.int32)
    joint = tl.load(joint_ptr + offsets, mask=column < root_at, other=float("-inf"))
    proposed = (beam >= 0) & (joint > float("-inf"))  # a mask forbids the others
    above = tl.where(proposed & (depth > 1), (depth - 2) * n + beam, root_at)  # parent's column
    token = tl.load(tokens_ptr + offsets, mask=proposed, other=0)
    token = tl.where(is_root, tl.load(root_ptr + b), token)
    x = tl.where(joint > (1 - BINS) * 0.25, tl.maximum(-4.0 * joint, 0.0), BINS - 1.0)
    low = tl.minimum(x.to(tl.int32), BINS - 2)
    falling = tl.min(tl.where(bins[None, :] <= bins[:, None], chances[None, :], 1.0), 1)
    p = tl.gather(falling, low, 0)
    q = tl.gather(falling, low + 1, 0)
    p = tl.maximum(p + (q - p) * (x - low.to(tl.float32)), q)
    chance = tl.where(proposed, p, tl.where(is_root, 1.0, -1.0))  # -1: no candidate
    source = tl.where(proposed, x.to(tl.int32), -1)

    chain_ptr += b * (n_chain + 1)
    match = tl.load(chain_ptr).to(tl.int32)
    factor = tl.sum(tl.where(bins == BINS + match, chances, 0.0), 0)
    power = 1.0
    last = root_at  # column of the chain's previous node
    for step in range(1, tl.where(match > 0, n_chain, 0) + 1):
        guess = tl.load(chain_ptr + step)
        power = tl.where(guess >= 0, power * factor, -1.0)  # after the chain's end
        same = (chance >= 0) & (depth == step) & (above == last) & (token == guess)
        twin = tl.max(tl.where(same, column, -1), 0)  # the heads' candidate for the same node
        own = (column == root_at + step) & (twin < 0) & (guess >= 0)
        above = tl.where(own, last, above)
        token = tl.where(own, guess, token)
        last = tl.where(twin < 0, root_at + step, twin)
        better = (column == last) & (power > chance)
        chance = tl.where(better, power, chance)
        source = tl.where(better, BINS + match, source)

    rank = pack_entries(chance, depth)
    node = _places(rank, token, entries_ptr + b * 2 * BLOCK_N, BLOCK_J)
    parent = tl.gather(node, above, 0)
    used = chance >= 0
    mask = node < T
    deepest = tl.max(tl.where(used & mask, depth, 0), 0)
    ancestors = tl.full([BLOCK_N], 1, tl.int64) << (node & 63).to(tl.int64)
    for level in range(1, deepest + 1):  # ancestors[node] = ancestors[parent] | 1 << node
        ancestors |= tl.where(depth == level, tl.gather(ancestors, above, 0), 0)
    plane = tl.num_programs(0).to(tl.int64) * T
    tree_ptr += b * T + node
    tl.store(tree_ptr, token, mask=mask)
    tl.store(tree_ptr + plane, parent.to(tl.int64), mask=mask)
    tl.store(tree_ptr + 2 * plane, tl.where(used, depth, 0).to(tl.int64), mask=mask)
    tl.store(tree_ptr + 3 * plane, tl.where(used, ancestors, 0), mask=mask)
    tl.store(tree_ptr + 4 * plane, source.to(tl.int64), mask=mask)
    tl.store(probabilities_ptr + b * T + node, tl.maximum(chance, 0.0), mask=mask)


def build_tree(root, candidates, chain, chances, temperature, tree_size):
    if not runs_triton(chances):
        return clover.build_tree(root, candidates, chain, chances, temperature, tree_size)
    B = len(root)
    candidates = candidates or Candidates.empty(root, 0, 1)
    chain = root.new_empty(B, 1) if chain is None else chain
    K, n = candidates.joint.shape[1:]
    n_chain = chain.shape[1] - 1
    tree = root.new_empty(5, B, tree_size)
    probabilities = chances.new_empty(B, tree_size)
    inputs = map(contiguous, (root, *candidates, chain, chances, temperature))
    launch(_build_tree_kernel, (B,), *inputs, tree, probabilities, K * n, n, n_chain, tree_size,
           BINS=BINS, SOURCES=SOURCES, **_pair_blocks(max(K * n + 1 + n_chain, tree_size), root),
           enable_fp_fusion=False)  # fused sums would round differently from torch's
    return Tree(*tree.unbind(), probabilities)


# --------------------------------------------------------------------------------------------------
# prompt_chain: the draft of a sequence with unread prompt tokens
#
#   node j is history[lengths + j], the child of node j - 1, up to the prompt's last token
#
# The tokens that follow are known, so `accept_path` accepts the whole chain.

@triton.jit(do_not_specialize=["S", "n", "T"])
def _prompt_chain_kernel(
    history_ptr, lengths_ptr, ends_ptr, tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr,
    sources_ptr, probabilities_ptr, chain_ptr, slots_ptr, S, n, T, BLOCK_T: tl.constexpr,
):
    """Program b: the tree of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    start = tl.load(lengths_ptr + slot)
    unread = tl.load(ends_ptr + slot) - start
    node = tl.arange(0, BLOCK_T)
    mask = (node < T) & (unread > 0)
    known = mask & (node <= unread)
    offsets = b * T + node
    index = node.to(tl.int64)
    token = tl.load(history_ptr + slot * S + start + node, mask=known, other=0)
    ancestors = (tl.full([BLOCK_T], 2, tl.int64) << index) - 1
    tl.store(tokens_ptr + offsets, token.to(tl.int64), mask=mask)
    tl.store(parents_ptr + offsets, tl.where(known & (node > 0), index - 1, 0), mask=mask)
    tl.store(depths_ptr + offsets, tl.where(known, index, 0), mask=mask)
    tl.store(ancestors_ptr + offsets, tl.where(known, ancestors, 0), mask=mask)
    tl.store(sources_ptr + offsets, tl.full([BLOCK_T], -1, tl.int64), mask=mask)
    tl.store(probabilities_ptr + offsets, tl.where(known, 1.0, 0.0), mask=mask)
    if chain_ptr is not None:
        tl.store(chain_ptr + b * (n + 1), 0, mask=unread > 0)


def prompt_chain(history, lengths, ends, tree, chain=None, slots=None):
    """Replaces, in place, the trees of the sequences with unread prompt tokens: lengths < ends.
    history: int32 [slots, S], with the whole prompts. lengths: index of each root, int32 [slots].
    ends: index of the prompt's last token, int32 [slots]. tree, chain: as from `build_tree` and
    `ngram_lookup`; a replaced tree has no sources and no match."""
    if not runs_triton(history):
        return prompt_chain_reference(history, lengths, ends, tree, chain, slots)
    B, T = tree.tokens.shape
    n = 0 if chain is None else chain.shape[1] - 1
    S = history.shape[1]
    inputs = map(contiguous, (history, lengths, ends))
    launch(_prompt_chain_kernel, (B,), *inputs, *tree, chain, contiguous(slots),
           S, n, T, BLOCK_T=triton.next_power_of_2(T), num_warps=1)


def prompt_chain_reference(history, lengths, ends, tree, chain=None, slots=None):
    if slots is not None:
        history, lengths, ends = (x[slots] for x in (history, lengths, ends))
    node = torch.arange(tree.tokens.shape[1], device=history.device)
    unread = (ends - lengths)[:, None]  # (B, 1)
    known = node <= unread
    index = (lengths[:, None] + node).clamp(max=history.shape[1] - 1).long()
    columns = (history.gather(1, index), (node - 1).clamp(min=0), node, (2 << node) - 1)
    values = *(known * column for column in columns), torch.full_like(node, -1), known
    for out, value in zip(tree, values):
        out.copy_(torch.where(unread > 0, value.to(out), out))
    if chain is not None:
        chain[:, :1] *= unread <= 0


# --------------------------------------------------------------------------------------------------
# accept_path
#
# Where steps read prompts, a target token is the known next one, whatever the model would have
# sampled.

@triton.jit(do_not_specialize=["T", "P", "n"])
def _accept_path_kernel(
    tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, sources_ptr, target_ptr, active_ptr,
    temperature_ptr, chain_ptr, history_ptr, lengths_ptr, ends_ptr, slots_ptr, counts_ptr, out_ptr,
    T, P, n, S, BINS: tl.constexpr, SCHEMA: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program b: the path of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    node = tl.arange(0, BLOCK_T)
    mask = node < T
    offsets = b * T + node
    token = tl.load(tokens_ptr + offsets, mask=mask, other=0)  # [BLOCK_T]
    parent = tl.load(parents_ptr + offsets, mask=mask, other=0)
    depth = tl.load(depths_ptr + offsets, mask=mask, other=0)
    ancestors = tl.load(ancestors_ptr + offsets, mask=mask, other=0)
    target = tl.load(target_ptr + offsets, mask=mask, other=0)
    expected = tl.load(target_ptr + b * T + parent, mask=mask, other=0)
    if history_ptr is not None:
        index = tl.load(lengths_ptr + slot) + depth
        end = tl.load(ends_ptr + slot)
        history_ptr += slot * S + index
        known = tl.load(history_ptr, mask=mask & (index <= end), other=0).to(tl.int64)
        expected = tl.where(index <= end, known, expected)
        known = tl.load(history_ptr + 1, mask=mask & (index < end), other=0).to(tl.int64)
        target = tl.where(index < end, known, target)
    mismatch = mask & (depth > 0) & (token != expected)
    rejected = tl.sum(mismatch.to(tl.int64) << node.to(tl.int64), 0)  # bitmask of nodes
    on_path = (ancestors != 0) & ((ancestors & rejected) == 0) & (depth < P)
    active = tl.load(active_ptr + slot)
    last = tl.max(tl.where(on_path, depth, 0), 0)

    plane = tl.num_programs(0).to(tl.int64) * P  # tokens, path, sources [B, P], then count [B]
    tl.store(out_ptr + 3 * plane + b, tl.where(active > 0, last + 1, 0))
    out_ptr += b * P
    rest = (node > last) & (node < P)
    zero = tl.zeros([BLOCK_T], tl.int64)
    tl.store(out_ptr + depth, target, mask=on_path)
    tl.store(out_ptr + plane + depth, node.to(tl.int64), mask=on_path)
    tl.store(out_ptr + node, zero + tl.sum(tl.where(node == 0, target, 0), 0), mask=rest)
    tl.store(out_ptr + plane + node, zero, mask=rest)
    source = tl.load(sources_ptr + offsets, mask=mask, other=-1)
    tl.store(out_ptr + 2 * plane + depth, source, mask=on_path)
    tl.store(out_ptr + 2 * plane + node, zero - 1, mask=rest)

    counts_ptr += tl.where(tl.load(temperature_ptr + b) > 0, 2 * SOURCES, 0)
    counted = (active == 1) & (node > 0) & (ancestors != 0) & (source >= 0) & (source < BINS)
    tl.atomic_add(counts_ptr + 2 * source, 1.0, mask=counted & on_path)
    tl.atomic_add(counts_ptr + 2 * source + 1, 1.0, mask=counted)
    if chain_ptr is not None:
        chain_ptr += b * (n + 1)
        match = tl.load(chain_ptr)
        compared = on_path & (depth < n)
        guess = tl.load(chain_ptr + 1 + depth, mask=compared, other=0)
        end = tl.minimum(last + 1, n)
        end = tl.min(tl.where(compared & (guess < 0), depth, end), 0)  # of a shorter chain
        right = tl.min(tl.where(compared & (target != guess), tl.minimum(depth, end), end), 0)
        counted = (match > 0) & ((active == 1) | (active == 2) & (match == SCHEMA))
        counts_ptr += 2 * (BINS + match)
        tl.atomic_add(counts_ptr, right.to(tl.float32), mask=counted)
        tl.atomic_add(counts_ptr + 1, tl.minimum(right + 1, end).to(tl.float32), mask=counted)


def accept_path(tree, target, active, max_path, temperature, counts, chain=None, slots=None,
                prompts=None):
    """`generate.accept_path` and `engine.acceptance.count_nodes`. prompts: (history, lengths, ends)
    as in `prompt_chain`, of prompts that may have unread tokens."""
    if not runs_triton(target):
        if prompts:
            target = known_targets(tree, target, *prompts, slots)
        accepted = generate.accept_path(tree, target, active, max_path, slots)
        active = active if slots is None else active[slots]
        count_nodes(counts, tree, accepted, active, temperature, chain)
        return unpack(torch.cat([x.flatten() for x in accepted]), max_path)
    history, lengths, ends = prompts or (None, None, None)
    B, T = target.shape
    n = 0 if chain is None else chain.shape[1] - 1
    out = target.new_empty(B * (3 * max_path + 1))
    S = history.shape[1] if prompts else 0
    inputs = *tree[:5], target, active, temperature, chain, history, lengths, ends, slots
    launch(_accept_path_kernel, (B,), *map(contiguous, inputs), counts, out, T, max_path, n, S,
           BINS=BINS, SCHEMA=SCHEMA, SOURCES=SOURCES,
           BLOCK_T=triton.next_power_of_2(max(T, max_path)), num_warps=1)
    return unpack(out, max_path)


def known_targets(tree, target, history, lengths, ends, slots=None):
    """The target tokens, known ones within a prompt."""
    if slots is not None:
        history, lengths, ends = (x[slots] for x in (history, lengths, ends))
    index = lengths[:, None] + 1 + tree.depths
    known = history.gather(1, index.clamp(max=history.shape[1] - 1)).long()
    return torch.where(index <= ends[:, None], known, target)


def unpack(out, P):
    """The `Accepted` in int64 [B (3 P + 1)], one column after another."""
    B = len(out) // (3 * P + 1)
    columns, count = out.split((3 * B * P, B))
    return Accepted(*columns.view(3, B, P), count)


def to_host(accepted):
    """A copy of `accept_path`'s result on the host, filled when the GPU gets there."""
    B, P = accepted.path.shape
    out = accepted.tokens.as_strided((B * (3 * P + 1),), (1,))
    return unpack(out.to("cpu", non_blocking=True, copy=True), P)


# --------------------------------------------------------------------------------------------------
# advance

@triton.jit(do_not_specialize=["P", "S", "C"])
def _advance_kernel(
    tokens_ptr, count_ptr, states_ptr, slots_ptr, lengths_ptr, root_ptr, history_ptr, state_ptr,
    P, S, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Program b: one sequence."""
    b = tl.program_id(0).to(tl.int64)
    slot = slot_of(slots_ptr, b)
    count = tl.load(count_ptr + b).to(tl.int32)
    if count == 0:
        return
    tokens_ptr += b * P
    last = count - 1
    length = tl.load(lengths_ptr + slot)
    tl.store(lengths_ptr + slot, length + count)
    tl.store(root_ptr + slot, tl.load(tokens_ptr + last))
    if history_ptr is not None:
        j = tl.arange(0, BLOCK_P)
        token = tl.load(tokens_ptr + j, mask=j < count, other=0)
        tl.store(history_ptr + slot * S + length + 1 + j, token.to(tl.int32), mask=j < count)
    if states_ptr is not None:
        for start in range(0, C, BLOCK_C):
            dims = start + tl.arange(0, BLOCK_C)
            state = tl.load(states_ptr + (b * P + last) * C + dims, mask=dims < C, other=0.0)
            tl.store(state_ptr + slot * C + dims, state, mask=dims < C)


def advance(accepted, lengths, root, history=None, states=None, state=None, slots=None):
    if not runs_triton(lengths):
        return generate.advance(accepted, lengths, root, history, states, state, slots)
    B, P = accepted.tokens.shape
    S = 0 if history is None else history.shape[1]
    C = 0 if states is None else states.shape[2]
    inputs = map(contiguous, (accepted.tokens, accepted.count, states, slots))
    launch(_advance_kernel, (B,), *inputs, lengths, root, history, state, P, S, C,
           BLOCK_P=triton.next_power_of_2(P), BLOCK_C=1024, num_warps=4)
