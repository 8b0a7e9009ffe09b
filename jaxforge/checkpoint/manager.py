"""Saves a run's state while it trains, and restores the newest checkpoint that is whole, at any layout."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxforge.checkpoint.arrays import is_same_order, is_stacked, load_one, shape_in_turn
from jaxforge.checkpoint.checksums import find_damage, write_checksums
from jaxforge.checkpoint.stored import saved_order, state_arrays
from jaxforge.config.errors import ConfigError
from jaxforge.models.layer_order import LayerOrder
from jaxforge.optim.host_memory import is_in_host_memory

_log = logging.getLogger(__name__)

# A checkpoint's folder holds these two items, and checksums.json over both.
_STATE = "state"
_METADATA = "metadata"
_TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"


class CheckpointManager:
    """Checkpoints in `directory/<step>/`: the newest `keep` of them, written in the background (Orbax).

    Every process of a run makes one and calls the same methods in the same order; Orbax has each write its own shards.
    A checkpoint appears under its final name only when it is complete, with checksums of its files, so a run killed at
    any moment leaves whole checkpoints and perhaps an unfinished folder, which the next manager removes.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, save_every_steps: int):
        self._directory = Path(directory).absolute()
        self._save_every_steps = save_every_steps
        self._step_being_saved = -1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        self._orbax = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_handlers={_STATE: ocp.StandardCheckpointHandler(), _METADATA: ocp.JsonCheckpointHandler()},
        )

    def maybe_save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> bool:
        """Saves if `step` is a multiple of `save_every_steps` (0: never).  True if it does."""
        if self._save_every_steps == 0 or step % self._save_every_steps != 0:
            return False
        return self.save(step, state, metadata)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> bool:
        """Saves `state` (a pytree of arrays) and `metadata` (JSON values); False if that step is saved already.

        Returns when the state is copied to host memory: its arrays may then be donated.  Files are written in the
        background; an error there (a full disk) is raised by the next call of save, wait or close.  Where arrays lie in
        host memory already it returns when the files are written: such arrays are written as they are, without a copy
        that the next step couldn't change.
        """
        self._orbax.wait_until_finished()
        if step in self._orbax.all_steps():
            return False
        self._step_being_saved = step
        items = ocp.args.Composite(
            **{
                _STATE: ocp.args.StandardSave(state, save_args=jax.tree_util.tree_map_with_path(_chunks, state)),
                _METADATA: ocp.args.JsonSave(dict(metadata)),
            }
        )
        saved = self._orbax.save(step, args=items, force=True)
        if any(is_in_host_memory(array) for array in jax.tree.leaves(state)):
            self._orbax.wait_until_finished()
        return saved

    def wait(self) -> None:
        """Returns when everything saved so far is on disk under its final name."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the background threads."""
        self._orbax.close()

    def latest_step(self) -> int | None:
        """The newest step that is complete on disk, whole or not; None if there is none."""
        return max(self._steps_on_disk(), default=None)

    def restore(self, abstract_state: Any, order: LayerOrder | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest whole checkpoint, as (step, state, metadata), or None if there are no checkpoints.

        `abstract_state`: a pytree of jax.ShapeDtypeStruct with shardings, which the state returned has; they may differ
        from those it was saved with.  So may `order`, in which the decoder's layers lie in it; the saved one is in
        the metadata.  A damaged checkpoint is passed over with a warning, and renamed to `<step>.broken` once an older
        one turns out to be whole.

        Raises ConfigError if the checkpoint is of another model, or if there are checkpoints and none is whole.
        """
        damage: dict[int, str] = {}
        steps = self._steps_newest_first()
        for step in steps:
            found = self._find_damage(step)
            if found is None:
                break
            damage[step] = found
        else:
            if not steps:
                return None
            reasons = "\n".join(f"  step {step}: {reason}" for step, reason in damage.items())
            raise ConfigError(
                f"no checkpoint in {self._directory} is whole; nothing was changed there\n{reasons}\n"
                "start in another --workdir, or move this folder away to start again from step 0"
            )
        metadata = self._orbax.restore(step, args=ocp.args.Composite(**{_METADATA: ocp.args.JsonRestore()}))[_METADATA]
        # Before anything is renamed: a checkpoint of another model is a mistake of the command, not of the files.
        self._check_tree(step, saved_order(metadata), abstract_state, order)
        for broken, reason in damage.items():
            self._set_aside(broken, reason, instead=step)
        if is_same_order(saved_order(metadata), order):
            items = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(abstract_state)})
            return step, self._orbax.restore(step, args=items)[_STATE], metadata
        return step, self._read_by_layer(step, saved_order(metadata), abstract_state, order), metadata

    def _read_by_layer(self, step: int, saved: LayerOrder | None, abstract_state: Any, order: LayerOrder | None) -> Any:
        """The state of a checkpoint whose layers lie elsewhere; host memory holds one layer of one array at a time."""
        _log.info("step %d: the decoder's layers lie in other places than in the checkpoint; read one by one", step)
        shapes = {path: leaf.shape for path, leaf in _arrays_by_path(self._orbax.item_metadata(step)[_STATE]).items()}
        arrays = state_arrays(self._directory / str(step) / _STATE, shapes, saved)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: load_one(arrays, _path_text(path), leaf, order=order), abstract_state
        )

    def _steps_on_disk(self) -> list[int]:
        return [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]

    def _steps_newest_first(self) -> list[int]:
        """The steps that the primary process sees: over a network, others may see them later."""
        steps = sorted(self._steps_on_disk(), reverse=True)
        num_steps = _from_primary(len(steps))
        return [_from_primary(steps[index] if index < len(steps) else -1) for index in range(num_steps)]

    def _find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint, the same answer in all processes, which divide its files among them."""
        found = find_damage(self._directory / str(step), jax.process_index(), jax.process_count())
        if jax.process_count() == 1:
            return found
        if found is not None and jax.process_index() != 0:
            _log.warning("checkpoint of step %d is damaged: %s", step, found)
        anywhere = multihost_utils.process_allgather(np.array(found is not None)).any()
        return (found or "another process found it damaged") if anywhere else None

    def _set_aside(self, step: int, reason: str, instead: int) -> None:
        """Renames a damaged checkpoint, so that its step can be saved again and nothing is lost."""
        folder = self._directory / str(step)
        if jax.process_index() == 0:
            aside = folder.with_name(f"{step}.broken")
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{step}.broken{number}")
            _log.warning(
                "checkpoint of step %d is damaged (%s): resuming from step %d; the damaged one is now %s",
                step, reason, instead, aside,
            )
            os.rename(folder, aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside checkpoint {step}")
        self._orbax.reload()

    def _check_tree(
        self, step: int, saved_in: LayerOrder | None, abstract_state: Any, order: LayerOrder | None
    ) -> None:
        """Raises ConfigError where the saved arrays aren't those of `abstract_state` by path, shape and dtype."""
        saved = _described(self._orbax.item_metadata(step)[_STATE], saved_in)
        wanted = _described(abstract_state, order)
        differences = [
            f"  {path}: saved {saved.get(path, 'nothing')}, the config makes {wanted.get(path, 'nothing')}"
            # parameters first: the optimizer's arrays follow from them
            for path in sorted(saved.keys() | wanted.keys(), key=lambda path: (path.startswith("optimizer/"), path))
            if saved.get(path) != wanted.get(path)
        ]
        if differences:
            shown = differences[:5] + ([f"  and {len(differences) - 5} more"] if len(differences) > 5 else [])
            raise ConfigError(
                f"the checkpoint of step {step} in {self._directory} is of another model or optimizer\n"
                + "\n".join(shown)
                + "\nuse the config that it was saved with, or another --workdir"
            )

    def _write_checksums(self) -> None:
        """Called by Orbax in the primary process, once all files of a checkpoint are written, before its renaming."""
        name = str(self._step_being_saved)
        write_checksums(self._directory / (name + _TEMPORARY_SUFFIX), [_STATE, _METADATA])


def _chunks(path: Any, _: jax.Array) -> ocp.SaveArgs:
    """Cuts a stack between its layers, so that a reader of one layer needn't decode the others."""
    return ocp.SaveArgs(shard_axes=(0,) if is_stacked(_path_text(path)) else ())


def _described(tree: Any, order: LayerOrder | None) -> dict[str, str]:
    """Path to "dtype[shape]" of every array of a tree, with the shape that it has without a pipeline."""
    return {
        path: f"{np.dtype(leaf.dtype).name}{list(shape_in_turn(path, leaf.shape, order))}"
        for path, leaf in _arrays_by_path(tree).items()
    }


def _arrays_by_path(tree: Any) -> dict[str, Any]:
    """Path to leaf of every array of a tree, whether of arrays, of abstract arrays or of Orbax's metadata."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {_path_text(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def _path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _from_primary(number: int) -> int:
    """The number that the primary process has."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.array(number)))
