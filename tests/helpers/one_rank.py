"""One rank of a job in this process, by the trainer's own functions, without its loop."""

import torch

from meshwright.models.loss import Batch
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import Meshes
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.build import build_trainer
from meshwright.train.resolve import ResolvedJob
from meshwright.train.trainer import StepResult


class OneRank:
    """Model and optimizer of `plan` on `device`; values are arbitrary before `initialize`."""

    def __init__(self, plan: ResolvedJob, meshes: Meshes, device: torch.device) -> None:
        config = plan.config
        self.plan, self.meshes, self.device = plan, meshes, device
        self.trainer = build_trainer(plan, meshes, device)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.detector = BadStepDetector(device, config.bad_steps)

    def initialize(self) -> None:
        for stage in self.model.stages:
            initialize(stage, self.plan.config.training.seed)

    def batches(self, seed: int = 0) -> list[Batch]:
        """Microbatches of random tokens, and of three documents each if they are masked."""
        training = self.plan.config.training
        shape = (training.local_batch_size, training.seq_len)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(self.plan.config.num_microbatches):
            tokens = torch.randint(self.plan.model_args.vocab_size, shape, generator=generator)
            documents = None
            if training.mask_documents:
                documents = (torch.arange(shape[1]) * 3 // shape[1]).int().repeat(shape[0], 1)
            found.append(Batch(tokens, tokens.roll(-1, 1), documents))
        return [batch.send(self.device) for batch in found]

    def step(self, number: int, batches: list[Batch]) -> StepResult:
        return self.trainer.step(number, batches, self.detector)
