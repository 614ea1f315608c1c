"""Writes a checkpoint's files by way of torch's own writer, and publishes them when all are there.

A `StorageWriter` of torch.distributed.checkpoint: an error of one rank, in any of its methods, is
gathered by `dcp.save` and raised on all.
"""

import io
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options
from zlib_ng.zlib_ng import crc32

from meshwright.checkpoint import commit
from meshwright.checkpoint.manifest import FileRecord
from meshwright.system.files import make_folder, sync_file

FLUSH_BYTES = 16 * 2**20

COPY_AHEAD_BYTES = 10_000_000
"""Copied from a GPU while others are written; torch's default."""


class WriteResults(list[WriteResult]):
    """The record of a rank's writes that torch wants, and ours."""

    files: dict[str, FileRecord]


class CommittingWriter(dcp.FileSystemWriter):
    """Writes to the folder `unfinished`, and as its last act publishes that.

    Args:
        unfinished: as `listing.unfinished_folder` names it.
        manifest: its content, apart from the records of files.
        is_staged: tensors are in host memory. Otherwise torch copies them from a GPU a few at a
            time, and waits for its current stream, which is the training's.
    """

    def __init__(
        self, unfinished: Path, manifest: Mapping[str, Any], is_staged: bool = False
    ) -> None:
        super().__init__(
            unfinished,
            sync_files=False,  # torch's way fails where there is no fsync
            per_thread_copy_ahead=0 if is_staged else COPY_AHEAD_BYTES,
        )
        self.fs: _ChecksummingFileSystem = _ChecksummingFileSystem()
        self._unfinished, self._manifest = unfinished, manifest

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the folder to the first rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder; runs on the first rank, before any writes."""
        make_folder(self._unfinished.parent)
        self._unfinished.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; its record goes to the first rank with the results."""
        with _no_checksums_in_zips():
            results = WriteResults(super().write_data(plan, planner).value())
        results.files = self.fs.written
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index and manifest, the last files; on the first rank, after all have written."""
        super().finish(metadata, results)
        files = dict(self.fs.written)
        for of_rank in results:
            assert isinstance(of_rank, WriteResults)
            files |= of_rank.files
        commit.publish(self._unfinished, self._manifest, files)

    def storage_meta(self) -> StorageMeta:
        """Nothing: torch's holds the folder's unfinished name, and a random number."""
        return StorageMeta()


class StagedPlanner(DefaultSavePlanner):
    """Plans from the tensors of the job, of which it reads no value; writes others for them."""

    def __init__(self, value_of: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._value_of = value_of

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the value, whichever part of the tensor it is: a rank holds one part of each."""
        return self._value_of(index.fqn)


def write(
    tensors: dict[str, Tensor],
    unfinished: Path,
    manifest: Mapping[str, Any],
    value_of: Callable[[str], Tensor] | None,
    group: ProcessGroup | None,
) -> None:
    """Write and publish a checkpoint. Collective over `group`.

    Args:
        tensors: the job's, by name.
        unfinished: the folder to write, as `CommittingWriter` takes it.
        manifest: its content, apart from the records of files.
        value_of: gives the values of this rank's part of a tensor, in host memory, when it is to be
            written; None: `tensors` have them.
        group: of the job; None: there is but this process.

    Raises:
        CheckpointException: on every rank, with each rank's error.
    """
    # no enable_plan_caching: after a save that failed before its first byte (a full disk), torch
    # 2.11 and 2.13 have every later one fail with KeyError
    dcp.save(
        tensors,
        storage_writer=CommittingWriter(unfinished, manifest, is_staged=value_of is not None),
        planner=None if value_of is None else StagedPlanner(value_of),
        process_group=group,
    )


@contextmanager
def _no_checksums_in_zips() -> Iterator[None]:
    """torch.save's own take half of a save's CPU time, and no one reads them."""
    were = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(were)


class _ChecksummingFileSystem(FileSystem):
    """Keeps a record of every file that is written."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        stream = _ChecksummingStream(path)
        try:
            yield stream
            stream.close()
        except BaseException:
            with suppress(OSError):  # of the rest of the buffer
                stream.close()
            if stream.error is not None:  # torch.save makes a RuntimeError of a full disk
                raise stream.error from None
            raise
        self.written[Path(path).name] = {"bytes": stream.tell(), "crc32": f"{stream.crc32:08x}"}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _ChecksummingStream(io.BufferedIOBase):
    """A file that is written from its first byte to its last."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.crc32 = self._length = self._flushed = 0
        self.error: OSError | None = None
        """Errors that torch.save may have hidden."""
        self._path = Path(path)
        self._file = open(path, "wb")  # noqa: SIM115

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = crc32(view, self.crc32)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        self._length += len(view)
        if self._length - self._flushed >= FLUSH_BYTES:
            # has Linux start to write them to the disk, which else is idle until the fsync
            length = self._length - self._flushed
            with suppress(OSError):  # it is advice, which some file systems don't take
                os.posix_fadvise(self._file.fileno(), self._flushed, length, os.POSIX_FADV_DONTNEED)
            self._flushed = self._length
        return len(view)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def tell(self) -> int:
        return self._length

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._file.flush()
                sync_file(self._file.fileno(), self._path)
            except OSError as error:
                self.error = self.error or error
                raise
            finally:
                self._file.close()
        super().close()
