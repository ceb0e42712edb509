"""The generator is Philox 2x64-10, and a draw is a function of its three arguments alone."""

import pytest

from shared.sampling.rng import philox2x64, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0xCA00A0459843D731, 0x66C24222C9A845B5)),
        ((2**64 - 1, 2**64 - 1), 2**64 - 1, (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344),
            0xA4093822299F31D0,
            (0x0A5E742C2997341C, 0xB0F883D38000DE5D),
        ),
    ],
)
def test_known_answers_of_the_published_generator(
    counter: tuple[int, int], key: int, expected: tuple[int, int]
) -> None:
    assert philox2x64(counter, key) == expected


def test_a_draw_is_the_top_53_bits_of_the_first_word() -> None:
    word = philox2x64((7, 3), 11)[0]
    assert uniform(seed=11, choice=3, position=7) == (word >> 11) / 2**53


def test_seed_choice_and_position_each_change_the_draw() -> None:
    draws = {uniform(s, c, p) for s in (1, 2) for c in (0, 1) for p in (10, 11)}
    assert len(draws) == 8


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5)


def test_draws_are_spread_evenly_over_the_unit_interval() -> None:
    counts = [0] * 10
    for position in range(5000):
        u = uniform(42, 0, position)
        assert 0.0 <= u < 1.0
        counts[int(u * 10)] += 1
    assert min(counts) > 430 and max(counts) < 570
