"""A Llama as one would write it by hand: torch alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workload import Workload, fill


class Block(nn.Module):
    """Attention with grouped heads and a gated feed-forward block."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.head = w.dim // w.n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(w.dim, 1e-5), nn.RMSNorm(w.dim, 1e-5)
        self.wq = nn.Linear(w.dim, w.dim, bias=False)
        self.wk = nn.Linear(w.dim, w.n_kv_heads * self.head, bias=False)
        self.wv = nn.Linear(w.dim, w.n_kv_heads * self.head, bias=False)
        self.wo = nn.Linear(w.dim, w.dim, bias=False)
        self.w1 = nn.Linear(w.dim, w.hidden_dim, bias=False)
        self.w2 = nn.Linear(w.hidden_dim, w.dim, bias=False)
        self.w3 = nn.Linear(w.dim, w.hidden_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        h = self.attention_norm(x)
        q, k, v = (
            m(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the halves of a head as pairs."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class PlainLlama(nn.Module):
    """Embedding, blocks, norm, output; gives the mean loss."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(w.vocab, w.dim)
        self.blocks = nn.ModuleList(Block(w) for _ in range(w.n_layers))
        self.norm, self.output = nn.RMSNorm(w.dim, 1e-5), nn.Linear(w.dim, w.vocab, bias=False)
        head = w.dim // w.n_heads
        frequency = 500000.0 ** -(torch.arange(0, head, 2) / head)
        angle = torch.outer(torch.arange(w.seq_len), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """(B, S) each -> ()."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.output(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten())


def build(w: Workload, device: torch.device) -> PlainLlama:
    """Return the model with the weights that all contenders start with."""
    with torch.device(device):
        model = PlainLlama(w)
    fill(model.named_parameters(), head=w.dim // w.n_heads)
    return model
