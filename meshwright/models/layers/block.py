"""A layer of a decoder."""

from torch import Tensor, nn

from meshwright.models.layers.attention import Attention
from meshwright.models.layers.document_mask import Mask
from meshwright.models.layers.feed_forward import FeedForward
from meshwright.models.layers.mixed import RMSNorm
from meshwright.models.table import BlockSpec


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream.

    Norms are of the input of each (Xiong et al. 2020, arXiv:2002.04745), or of its output (OLMo
    Team 2024, arXiv:2501.00656, section 3.2).
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.norm = spec.norm
        self.attention_norm = RMSNorm(spec.attention.dim, eps=spec.norm_eps)
        self.attention = Attention(spec.attention)
        self.ffn_norm = RMSNorm(spec.attention.dim, eps=spec.norm_eps)
        self.feed_forward = FeedForward(spec.feed_forward)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        if self.norm == "post":
            x = x + self.attention_norm(self.attention(x, cos, sin, mask))
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))
