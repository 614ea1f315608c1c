"""First weights, samples, optimizers, checkpoints and resumes."""

from tests.faults.fault import Fault

STATES = (
    Fault(
        "stages_begin_alike",
        "Modalities/modalities#426",
        "parallelisms/initialize.py",
        "        std = model.table.parameters[name].std\n",
        "        std = model.table.parameters[name].std\n"
        "        for place, layer in enumerate(model.layers):\n"
        '            name = name.replace(f"layers.{layer}.", f"layers.{place}.")\n',
        {"pp": 2},
        "initial layers.",
    ),
    Fault(
        "tp_ranks_begin_alike",
        "InternLM/InternLM#405",
        "parallelisms/initialize.py",
        "tuple(parameter.shape), offset)",
        "tuple(parameter.shape), (0,) * len(offset))",
        {"tp": 2},
        "initial ",
    ),
    Fault(
        "every_rank_reads_the_same",
        "huggingface/datasets#5360, Lightning-AI/litData#411",
        "datasets/loader.py",
        "            if index // self.local_batch_size % self.dp_size == self.dp_rank\n",
        "            if index // self.local_batch_size % self.dp_size == 0\n",
        {"dp_shard": 2},
        "batches:",
    ),
    Fault(
        "tp_ranks_read_other_samples",
        "huggingface/accelerate#3092",
        "train/build.py",
        "        dp_rank=meshes.dp.get_local_rank(),\n",
        "        dp_rank=meshes.world.get_local_rank() % plan.dims.dp,\n",
        {"dp_shard": 2, "tp": 2},
        "batches:",
    ),
    Fault(
        "validation_reads_on",
        "pytorch/torchtitan#2637, pytorch/torchtitan#2791",
        "train/validation.py",
        "        stream = SampleStream(\n            [source], [1], Cursor(), rules,",
        '        begin = self.read_before = getattr(self, "read_before", -16) + 16\n'
        "        stream = SampleStream(\n"
        "            [source], [1], Cursor(begin, (begin,)), rules,",
        {"dp_shard": 2},
        "validation/loss",
    ),
    Fault(
        "weight_decay_by_the_shape_of_flat_shards",
        "mlfoundations/open_clip#358, verl-project/verl#7215",
        "train/optim/optimizers.py",
        "settings = settings_of(name, parameter.ndim, config)",
        "settings = settings_of(name, 1 if is_dtensor(parameter) else parameter.ndim, config)",
        {"dp_shard": 2},
        "update:",
    ),
    Fault(
        "muon_of_shards",
        "deepspeedai/DeepSpeed#8437",
        "train/optim/matrices.py",
        "        wholes = self._exchange.gather(parts)\n",
        "        found = [p.unsqueeze(0) for p in parts]\n"
        "        found = [self._direction_of(p, self._config)[0] for p in found]\n"
        "        self._exchange.scatter = lambda *_: found  # type: ignore[method-assign]\n"
        "        wholes = self._exchange.gather(parts)\n",
        {"tp": 2},
        "update:",
        ["--optimizer.name=muon"],
    ),
    Fault(
        "moments_lost_at_a_resume",
        "KempnerInstitute/KempnerForge#115",
        "checkpoint/state.py",
        "if saved := _below(OPTIMIZER, state):",
        "if (saved := _below(OPTIMIZER, state)) and len(saved) < 0:",
        {"dp_shard": 2},
        "not as it was saved: optimizer.",
    ),
    Fault(
        "learning_rate_counts_from_the_resume",
        "NVIDIA-NeMo/Automodel#763, pytorch/torchtitan#4598",
        "train/trainer.py",
        "        set_learning_rate(self.optimizer, self.lr_at(step))\n",
        '        self.taken = getattr(self, "taken", 0) + 1\n'
        "        set_learning_rate(self.optimizer, self.lr_at(self.taken))\n",
        {"dp_shard": 2},
        "resume: not as without it: ",
    ),
    Fault(
        "data_begins_anew_at_a_resume",
        "KempnerInstitute/KempnerForge#51",
        "train/build.py",
        "        weights(training.datasets),\n        cursor,\n",
        "        weights(training.datasets),\n        Cursor(),\n",
        {"dp_shard": 2},
        "samples",
    ),
    Fault(
        "places_of_other_ranks_not_saved",
        "pytorch/torchtitan#409",
        "datasets/loader.py",
        "    return merged(cursors)\n",
        "    return cursor\n",
        {"dp_shard": 2},
        "samples",
        ["--training.dataset_mode=streamed"],
    ),
    Fault(
        "second_epoch_without_its_first_part",
        "Lightning-AI/litgpt#1712",
        "datasets/cached.py",
        "        epoch, position = divmod(index, self.samples_per_epoch)\n",
        "        epoch, position = divmod(index, self.samples_per_epoch)\n"
        '        self.began = getattr(self, "began", (epoch, position))\n'
        "        if epoch > self.began[0]:\n"
        "            rest = self.samples_per_epoch - self.began[1]\n"
        "            position = self.began[1] + position % rest\n",
        {"dp_shard": 2},
        "samples",
    ),
    Fault(
        "layers_numbered_anew_on_each_stage",
        "NVIDIA/Megatron-LM#7452, finding 12",
        "checkpoint/state.py",
        "        state: dict[str, Tensor] = {MODEL + k: v for k, v in model_state.items()}\n",
        "        state: dict[str, Tensor] = {\n"
        "            MODEL + _renumbered(k, model_state): v for k, v in model_state.items()\n"
        "        }\n",
        {"pp": 2},
        "checkpoint: does not hold model.",
        also=(
            (
                "        set_model_state_dict(self._model, _below(MODEL, state))\n",
                "        own = get_model_state_dict(self._model)\n"
                "        there = _below(MODEL, state)\n"
                "        own = {name: there[_renumbered(name, own)] for name in own}\n"
                "        set_model_state_dict(self._model, own)\n",
            ),
            (
                "def _below(",
                "def _renumbered(name: str, all_of: dict[str, Any]) -> str:\n"
                '    parts = name.split(".")\n'
                '    if parts[0] == "layers":\n'
                '        layers = {int(n.split(".")[1]) for n in all_of if n[:7] == "layers."}\n'
                "        parts[1] = str(sorted(layers).index(int(parts[1])))\n"
                '    return ".".join(parts)\n'
                "\n"
                "\n"
                "def _below(",
            ),
        ),
    ),
    Fault(
        "queries_and_keys_not_permuted_at_import",
        "pytorch/torchtitan#1441, pytorch/torchtitan#335",
        "checkpoint/conversion/readers.py",
        "            box = pairs(box, foreign.head_dim)\n",
        "            pass\n",
        {},
        "attention.wq.weight differs from the checkpoint",
        finder="export",
    ),
)
