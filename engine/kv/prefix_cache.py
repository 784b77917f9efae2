"""Which published blocks hold the KV of a given prefix. Knows hashes and layer groups; owns no pages.

The hash of a block is sha256 over its parent's hash and its tokens, so it stands for the whole prefix; the first
parent is the root, which stands for everything else the KV depends on: weights, type, geometry, windows, tenant.
Full blocks are shared. Of one that is only begun, the end of a system prompt, everybody gets a copy to go on in.
"""

from __future__ import annotations

from hashlib import sha256

from engine.kv.blocks import Block, BlockGroup, Blocks
from engine.kv.geometry import KVGeometry, first_seen_block
from engine.sequence import Sequence


def root_hash(digest: str, geometry: KVGeometry) -> bytes:
    """`digest` names weights and config."""
    return sha256(repr((digest, geometry)).encode()).digest()


def salted(root: bytes, salt: str) -> bytes:
    """The root of a tenant who must not learn from the time of a hit what others asked. No salt: that of everybody."""
    return sha256(root + salt.encode("utf-8", "surrogatepass")).digest() if salt else root


class PrefixCache:
    """The prefixes of one checkpoint."""

    def __init__(self, root: bytes, groups: tuple[BlockGroup, ...], blocks: Blocks, block_tokens: int) -> None:
        self._root = root
        self._groups = groups
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._begun: set[int] = set()  # how many tokens the blocks that were published half full hold

    def match(self, sequence: Sequence) -> int:
        """Blocks of the longest prefix that every group can serve; the last token is always left to compute.

        Full attention needs each block of the prefix, a window only those that the token after the prefix still sees.
        """
        hit = (sequence.length - 1) // self._block_tokens
        hashes = self._hashes(sequence, hit)
        while True:
            found = hit
            for group in self._groups:
                found = longest_run(group, hashes, found, self._block_tokens)
            if found == hit:
                return hit
            hit = found

    def held(self, sequence: Sequence, hit: int) -> list[list[Block | None]]:
        """Per group the blocks of a matched prefix, None below the window. Takes no reference."""
        table = []
        for group in self._groups:
            first = min(hit, first_seen_block(group.window, hit * self._block_tokens, self._block_tokens))
            table.append([None] * first + [group.published[h] for h in sequence.block_hashes[first:hit]])
        return table

    def begun(self, sequence: Sequence, hit: int) -> tuple[int, list[Block]]:
        """The longest beginning of the block behind a matched prefix: its tokens, and by group who holds them; none: 0.
        Takes no reference."""
        most = sequence.length - 1 - hit * self._block_tokens
        for tokens in sorted((each for each in self._begun if each <= most), reverse=True):
            key = self._hash(sequence, hit, tokens)
            if all(key in group.published for group in self._groups):
                return tokens, [group.published[key] for group in self._groups]
        return 0, []

    def publish(self, sequence: Sequence, block: Block, index: int) -> Block:
        """As `Blocks.publish`, of the block at this place in the sequence."""
        return self._blocks.publish(block, self._hashes(sequence, index + 1)[index])

    def publish_begun(self, sequence: Sequence, block: Block, index: int, tokens: int) -> Block:
        """The same of one that holds so many tokens, and is never written again."""
        self._begun.add(tokens)
        return self._blocks.publish(block, self._hash(sequence, index, tokens))

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """At least the first `count` hashes of the sequence, each computed once in its life."""
        hashes = sequence.block_hashes
        for index in range(len(hashes), count):
            hashes.append(self._hash(sequence, index, self._block_tokens))
        return hashes

    def _hash(self, sequence: Sequence, index: int, tokens: int) -> bytes:
        """Of the first `tokens` tokens of this block, behind all before it, whose hashes are known."""
        parent = sequence.block_hashes[index - 1] if index else salted(self._root, sequence.salt)
        start = index * self._block_tokens
        return sha256(parent + sequence.tokens[start : start + tokens].tobytes()).digest()


class NothingShared:
    """Stands in for PrefixCache where sharing is off: the same answers, more work and more pages."""

    def __init__(self, root: bytes, groups: tuple[BlockGroup, ...], blocks: Blocks, block_tokens: int) -> None:
        self._groups = groups

    def match(self, sequence: Sequence) -> int:
        return 0

    def held(self, sequence: Sequence, hit: int) -> list[list[Block | None]]:
        return [[] for _ in self._groups]

    def begun(self, sequence: Sequence, hit: int) -> tuple[int, list[Block]]:
        return 0, []

    def publish(self, sequence: Sequence, block: Block, index: int) -> Block:
        return block

    def publish_begun(self, sequence: Sequence, block: Block, index: int, tokens: int) -> Block:
        return block


def longest_run(group: BlockGroup, hashes: list[bytes], limit: int, block_tokens: int) -> int:
    """The longest prefix of at most `limit` blocks that this group alone can serve."""
    if group.window is None:
        return next((i for i in range(limit) if hashes[i] not in group.published), limit)
    found = limit
    for index in range(limit - 1, -1, -1):
        if hashes[index] not in group.published:
            found = index  # whatever sees this block cannot be served
        elif index <= first_seen_block(group.window, found * block_tokens, block_tokens):
            break
    return found
