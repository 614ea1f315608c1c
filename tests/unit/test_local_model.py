"""Where the tensors of a rank's part of the model are."""

import torch

from meshwright.models.decoder import Decoder
from meshwright.parallelisms.local_model import allocate
from tests.helpers.tiny import SEQ_LEN, TINY


def test_buffers_may_be_elsewhere_than_parameters() -> None:
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
    allocate(model, parameters=cpu, buffers=elsewhere)
    assert {parameter.device for parameter in model.parameters()} == {cpu}
    assert {buffer.device for buffer in model.buffers()} == {elsewhere}
    assert not any("cos" in name for name in model.state_dict())
