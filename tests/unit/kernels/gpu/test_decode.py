"""A decode step in five kernels a layer against the general kernels: split and unsplit, one row and many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.batch import Heads, PagedKV
from shared.kernels.decoder import LayerWeights
from shared.kernels.gpu.decode import PLANS, DecodeLayers, Plan, plan_for
from shared.kernels.gpu.decode_attention import Split
from shared.kernels.gpu.matmul import Scratch
from shared.kernels.gpu.stream import Tile
from shared.kernels.gpu.tokens import FAILED, likeliest
from shared.models.gpu_decoder import GpuDecoder
from shared.models.weights import DecoderWeights
from tests.fakes.configs import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Tensor cores want bfloat16; the interpreter's bfloat16 is not worth comparing.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 6e-2 if DEVICE == "cuda" else 2e-4
CONFIG = tiny_config(
    vocab_size=320,
    num_valid_tokens=320,
    hidden_size=128,
    intermediate_size=192,
    num_heads=8,
    head_dim=32,
    max_position=128,
)
BLOCK, PER_ROW = 8, 8


def tile(rows: int, splits: int = 1) -> Tile:
    return Tile(rows, 64, 32, splits, 2, 4)


MATMUL = Plan(16, tile(16), tile(16, 2), tile(16), tile(16, 3), tile(16), Split(16, 1, 2, 4))
SPLIT = replace(MATMUL, qkv=tile(16, 2), attention=Split(16, 4, 2, 4))
MATVEC = Plan(
    1, Tile(1, 16, 64, 1, 0, 4), Tile(1, 16, 64, 1, 2, 4), Tile(1, 16, 64, 1, 0, 4),
    Tile(1, 16, 64, 1, 0, 4), Tile(1, 16, 64, 1, 2, 4), Split(16, 4, 2, 4),
)  # fmt: skip


class World:
    """Weights, filled memory and rows. Slots that no token was written to are NaN."""

    def __init__(self, positions: list[int], *, norms: bool = True) -> None:
        torch.manual_seed(len(positions))
        e, i, d = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim
        q, w = CONFIG.num_heads * d, (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * d

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns) / columns**0.5).to(DEVICE, DTYPE)

        def norm(size: int) -> torch.Tensor:
            return (torch.rand(size) + 0.5).to(DEVICE)

        layers = tuple(
            LayerWeights(
                norm(e), matrix(w, e), matrix(e, q), norm(e), matrix(2 * i, e), matrix(e, i),
                q_norm_D=norm(d) if norms else None, k_norm_D=norm(d) if norms else None, index=n,
            )
            for n in range(CONFIG.num_layers)
        )  # fmt: skip
        embed = matrix(CONFIG.vocab_size, e) * 5
        self.weights = DecoderWeights(embed, embed, norm(e), layers)
        count = len(positions)
        self.tables = torch.randperm(count * PER_ROW).view(count, PER_ROW).int().to(DEVICE)
        shape = (count * PER_ROW, CONFIG.num_kv_heads, CONFIG.num_layers, 2, BLOCK, d)
        self.data = torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE)
        for row, position in enumerate(positions):
            for p in range(position):
                block = self.data[self.tables[row, p // BLOCK]]
                block[:, :, :, p % BLOCK] = torch.randn(block[:, :, :, 0].shape).to(DEVICE, DTYPE)
        self.positions = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        self.rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
        self.tokens = torch.randint(0, CONFIG.vocab_size, (count,)).int().to(DEVICE)
        self.last = torch.zeros(count, dtype=torch.int32, device=DEVICE)

    def step(self, plan: Plan, times: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, tokens and the memory after the step, run so often."""
        kv = PagedKV(self.data.clone(), self.tables)
        decoder = GpuDecoder(CONFIG, self.weights, [kv])
        heads = Heads(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.head_dim**-0.5, 1e-6)
        layers = DecodeLayers(
            plan,
            len(self.rows),
            self.weights.layers,
            self.weights.embed_VE,
            self.weights.head_VE,
            self.weights.norm_E,
            [kv],
            heads,
            (decoder._cos_PD, decoder._sin_PD),
            Scratch(torch.device(DEVICE), 1 << 18, 1 << 8),
        )
        for _ in range(times):
            logits, tokens = layers(self.tokens, self.rows, self.positions, self.last)
        return logits, tokens, kv.data_BKL2SD

    def general(self) -> tuple[torch.Tensor, torch.Tensor]:
        kv = PagedKV(self.data.clone(), self.tables)
        step = GpuDecoder(CONFIG, self.weights, [kv]).decode_step(len(self.rows))
        logits, _ = step(self.tokens, self.rows, self.positions, self.last.clone())
        return logits, kv.data_BKL2SD


@pytest.mark.parametrize(
    ("plan", "positions", "norms"),
    [
        (MATMUL, [5, 0, 37, 63], True),
        (SPLIT, [5, 0, 37, 63, 16], False),
        (MATVEC, [41], True),
        (MATVEC, [0], False),
    ],
    ids=["matmul", "split", "matvec", "first token"],
)
def test_logits_and_memory_are_those_of_the_general_kernels(
    plan: Plan, positions: list[int], norms: bool
) -> None:
    world = World(positions, norms=norms)
    wanted, memory = world.general()
    logits, tokens, written = world.step(plan, times=2)  # nothing may be left behind by the first
    torch.testing.assert_close(logits, wanted, rtol=TOLERANCE, atol=TOLERANCE * 5)
    torch.testing.assert_close(written, memory, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    own = likeliest(logits, world.rows, torch.zeros_like(world.last))
    assert torch.equal(tokens, own) and torch.equal(world.last, own)


def test_rows_that_fill_a_step_up_are_passed_over() -> None:
    world = World([5, 20, 9])
    whole, tokens, _ = world.step(SPLIT)
    world.positions[1] = world.rows[1] = -1
    world.last[1] = 77
    logits, _, written = world.step(SPLIT)
    assert torch.equal(logits[[0, 2]], whole[[0, 2]])
    assert world.last.tolist() == [tokens[0], 77, tokens[2]]
    assert torch.equal(written[world.tables[1].long()].isnan(), world.data[world.tables[1].long()].isnan())


@pytest.mark.gpu  # the interpreter cannot find the largest of nothing but NaN
@pytest.mark.parametrize("plan", [SPLIT, MATVEC], ids=["matmul", "matvec"])
def test_rows_that_are_not_finite_name_no_token(plan: Plan) -> None:
    world = World([20] if plan is MATVEC else [20, 21])
    world.data[world.tables[0, 0]] = torch.nan
    _, tokens, _ = world.step(plan)
    assert tokens[0] == FAILED and (len(tokens) == 1 or tokens[1] >= 0)


def test_plans_are_taken_where_their_tiles_fit() -> None:
    e, i, heads = 4096, 12288, Heads(32, 8, 128, 1.0, 1e-6)
    shapes = ((6144, e), (e, e), (2 * i, e), (e, i))
    qkv, o, gate_up, down = (torch.empty(shape, device="meta") for shape in shapes)
    layer = LayerWeights(qkv, qkv[0], o, qkv[0], gate_up, down)
    layer = replace(layer, attn_norm_E=qkv[0], qkv_WE=qkv, o_EW=o, mlp_norm_E=qkv[0])
    head = torch.empty(151936, e, device="meta")
    kv = PagedKV(torch.empty(1, 8, 1, 2, 16, 128, device="meta"), torch.empty(1, 1))
    for rows, place in ((1, 0), (2, 1), (16, 1), (17, 2), (64, 3)):
        assert plan_for(rows, [layer], head, heads, [kv]) is PLANS[place]
    assert plan_for(65, [layer], head, heads, [kv]) is None
    assert plan_for(1, [layer], head[:151935], heads, [kv]) is None
    assert plan_for(1, [replace(layer, o_bias_E=qkv[0])], head, heads, [kv]) is None
    assert plan_for(1, [layer], head, heads, [replace(kv, window=64)]) is None
