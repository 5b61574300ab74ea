"""Stored frames: whole and right, or refused."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from everplex.storage.codec import canonical_json, compress, decompress, same_content, sha256_hex
from everplex.storage.errors import CorruptObjectError

CONTENT = random.Random(5).randbytes(150) + b"a run of equal bytes" * 20
FRAME = compress(CONTENT)


@given(st.binary(max_size=2000))
def test_round_trip(content: bytes) -> None:
    """What is compressed comes back."""
    assert decompress(compress(content), "x.zst") == content


def test_every_flipped_bit_is_seen() -> None:
    """No single flipped bit gives other content."""
    for position in range(len(FRAME)):
        for bit in range(8):
            damaged = bytearray(FRAME)
            damaged[position] ^= 1 << bit
            try:
                # A bit of the header may be one that no decoder reads: then the content is the same.
                assert decompress(bytes(damaged), "x.zst") == CONTENT
            except CorruptObjectError as error:
                assert "x.zst" in str(error)  # noqa: PT017 - which of the two happens is the frame's affair


def test_frame_without_checksum_would_not_be() -> None:
    """The checksum is what sees flipped bits: a frame without it decodes some of them to something else."""
    unchecked = zstandard.ZstdCompressor(write_checksum=False).compress(CONTENT)
    wrong = 0
    for position in range(len(unchecked)):
        damaged = bytearray(unchecked)
        damaged[position] ^= 1
        try:
            wrong += decompress(bytes(damaged), "x.zst") != CONTENT
        except CorruptObjectError:
            continue
    assert wrong > 0


def test_every_truncation_is_seen() -> None:
    """A frame torn at any length is refused."""
    for length in range(len(FRAME)):
        with pytest.raises(CorruptObjectError, match=r"x\.zst"):
            decompress(FRAME[:length], "x.zst")


@pytest.mark.parametrize("more", [FRAME, compress(b""), b"\0", b"trailing", FRAME[:9]])
def test_nothing_may_follow_the_frame(more: bytes) -> None:
    """A second frame or trailing bytes are refused rather than dropped."""
    with pytest.raises(CorruptObjectError, match=r"x\.zst"):
        decompress(FRAME + more, "x.zst")


def test_bomb_that_declares_its_size() -> None:
    """A frame that declares more than is allowed is refused before it is decoded."""
    bomb = compress(bytes(1 << 20))
    assert len(bomb) < 200
    with pytest.raises(CorruptObjectError, match="at most 1000 bytes, found 1048576 bytes"):
        decompress(bomb, "bomb.zst", max_bytes=1000)
    assert decompress(bomb, "bomb.zst", max_bytes=1 << 20) == bytes(1 << 20)


def test_bomb_that_hides_its_size() -> None:
    """A frame that declares no size is refused."""
    streamed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(CorruptObjectError, match="unknown size"):
        decompress(streamed, "bomb.zst")


def test_bomb_that_lies_about_its_size() -> None:
    """A frame whose header declares less than it holds is refused."""
    honest = compress(bytes(1 << 20))
    assert int.from_bytes(honest[5:9], "little") == 1 << 20
    liar = honest[:5] + (1000).to_bytes(4, "little") + honest[9:]
    assert zstandard.frame_content_size(liar) == 1000
    with pytest.raises(CorruptObjectError):
        decompress(liar, "bomb.zst", max_bytes=2000)


def test_threads_compress_at_once() -> None:
    """Threads that compress together do not share a compressor."""
    contents = [random.Random(seed).randbytes(1000) * 50 for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(compress, contents))
    assert [decompress(frame, "x.zst") for frame in frames] == contents


def test_same_content() -> None:
    """Frames are equal by what they hold; other objects, and broken frames, by their bytes."""
    other_level = zstandard.ZstdCompressor(level=-50, write_checksum=True).compress(CONTENT)
    assert other_level != FRAME
    assert same_content("a.zst", FRAME, other_level)
    assert not same_content("a.json", FRAME, other_level)
    assert not same_content("a.zst", FRAME, compress(CONTENT + b"!"))
    assert not same_content("a.zst", FRAME, FRAME[:-1])
    assert same_content("a.zst", b"no frame", b"no frame")


def test_canonical_json() -> None:
    """Equal values give equal bytes, whatever order they were made in."""
    assert canonical_json({"b": 1, "a": [1.5, None]}) == canonical_json({"a": [1.5, None], "b": 1})
    assert canonical_json({"b": 1, "a": {"d": 2, "c": 3}}) == b'{"a":{"c":3,"d":2},"b":1}'


def test_sha256() -> None:
    """The digest is SHA-256 in lower-case hexadecimal (FIPS 180 example)."""
    assert sha256_hex(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
