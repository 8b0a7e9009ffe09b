"""Tars of WebDataset: members of one name make a sample, read without unpacking."""

import io
import json
import tarfile

import pytest

from jaxforge.data.conversation import SampleError
from jaxforge.data.webdataset import TarSamples


def write_tar(path, members):
    """A tar of (name, bytes, text or object) members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            content = json.dumps(content) if isinstance(content, (dict, list)) else content
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(tmp_path, members):
    return TarSamples(write_tar(tmp_path / "shard.tar", members))


def image(name, content):
    return {"bytes": content, "path": name}


def test_members_of_one_name_are_a_sample(tmp_path):
    found = samples(
        tmp_path,
        [
            ("a/0001.json", {"messages": ["1"]}),
            ("a/0001.jpg", b"jpg 1"),
            ("a/0002.png", b"png 2"),
            ("a/0002.json", {"messages": ["2"]}),
        ],
    )
    assert [found.place(i) for i in range(len(found))] == ["a/0001", "a/0002"]
    assert found.raw(0) == {"messages": ["1"], "images": [image("a/0001.jpg", b"jpg 1")]}
    assert found.raw(1) == {"messages": ["2"], "images": [image("a/0002.png", b"png 2")]}


def test_images_that_the_json_names_come_in_its_order(tmp_path):
    found = samples(
        tmp_path,
        [
            ("x.first.jpg", b"1"),
            ("x.second.WEBP", b"2"),
            ("x.json", {"images": ["second.WEBP", "x.first.jpg", "data:image/png;base64,AA"]}),
        ],
    )
    assert found.raw(0)["images"] == [
        image("x.second.WEBP", b"2"),
        image("x.first.jpg", b"1"),
        "data:image/png;base64,AA",
    ]


def test_a_single_image_and_content_parts_may_name_members(tmp_path):
    part = {"type": "image_url", "image_url": "jpg"}
    found = samples(
        tmp_path,
        [
            ("x.json", {"image": "x.jpg"}),
            ("x.jpg", b"x"),
            ("y.json", {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}),
            ("y.jpg", b"y"),
        ],
    )
    assert found.raw(0) == {"image": [image("x.jpg", b"x")]}
    (message,) = found.raw(1)["messages"]
    assert message["content"][0] == {"type": "image_url", "image_url": image("y.jpg", b"y")}
    assert "images" not in found.raw(1)


def test_a_text_is_plain_or_the_answer_to_its_images(tmp_path):
    found = samples(tmp_path, [("x.txt", "words\n"), ("y.txt", "a cat\n"), ("y.1.jpg", b"1"), ("y.2.jpg", b"2")])
    assert found.raw(0) == {"text": "words\n"}
    assert found.raw(1) == {
        "messages": [{"role": "user", "content": "<image><image>"}, {"role": "assistant", "content": "a cat"}],
        "images": [image("y.1.jpg", b"1"), image("y.2.jpg", b"2")],
    }


@pytest.mark.parametrize(
    "members, kind, message",
    [
        ([("x.json", "{")], "bad json", "can't be parsed as JSON"),
        ([("x.json", [])], "bad format", "is a JSON list, not an object"),
        ([("x.jpg", b"1")], "bad format", "has neither a .json nor a .txt, only .jpg"),
        ([("x.txt", b"\xff")], "bad format", "its .txt is not UTF-8"),
        (
            [("x.json", {"images": ["y.jpg"]}), ("x.jpg", b"1")],
            "missing media",
            "names the image 'y.jpg'; the tar has x.jpg",
        ),
    ],
)
def test_a_broken_sample_says_what_it_lacks(tmp_path, members, kind, message):
    with pytest.raises(SampleError) as error:
        samples(tmp_path, members).raw(0)
    assert error.value.kind == kind and message in str(error.value)


def test_hidden_members_and_folders_are_no_samples(tmp_path):
    path = write_tar(tmp_path / "shard.tar", [("._x.json", "{}"), ("x.txt", "words")])
    with tarfile.open(path, "a") as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    assert [TarSamples(path).place(0)] == ["x"] and len(TarSamples(path)) == 1
