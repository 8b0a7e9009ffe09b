"""What a notebook uses: the public names, without flags."""

import absl.flags
import pytest
from commands import RECIPES

import jaxforge


def test_train_runs_in_this_process_and_touches_no_flags(tmp_path):
    config = jaxforge.load_config(RECIPES / "tiny_text.py")
    config.train.steps = 3
    result = jaxforge.train(config, workdir=tmp_path)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert result.step == 3 and result.workdir == tmp_path
    assert not absl.flags.FLAGS.is_parsed()


def test_functions_keep_their_names_beside_the_command_lines():
    import jaxforge.plan
    import jaxforge.train  # noqa: F401

    assert callable(jaxforge.train) and callable(jaxforge.plan)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="trian"):
        jaxforge.trian  # noqa: B018
