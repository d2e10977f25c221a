"""Damaged files and strings: decoders and readers give the value of the undamaged input, or raise one of two errors.

TensorFlow 2.21 raises `DataLossError` and `InvalidArgumentError` for the same inputs. A format without checksums may
give another value. The flipped bits follow from a seed.
"""

from __future__ import annotations

import pytest

# `attempt` counts the inputs that give the same value, another value, an accepted error, and each other exception.
START = """
import collections, gzip, io, os, random, struct, tempfile, zlib
from PIL import Image

numbers = random.Random(7)
path = tempfile.mkdtemp() + "/file"

def damage(data, cut):
    data = bytearray(data)
    kind = numbers.randrange(4 if cut else 3)
    if kind == 3:
        return bytes(data[: numbers.randrange(1, len(data))])
    for _ in range(3 if kind == 2 else 1):
        data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    return bytes(data)

def attempt(read, data, times, cut):
    expected, counts = repr(read(data)), collections.Counter()
    for _ in range(times):
        try:
            counts["same" if repr(read(damage(data, cut))) == expected else "another value"] += 1
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            counts["error"] += 1
        except Exception as error:
            counts[f"{type(error).__name__}: {error}"] += 1
    return counts

def check(read, data, has_checksum, times=60, cut=True):
    counts = attempt(read, data, times, cut)
    allowed = {"same", "error"} | (set() if has_checksum else {"another value"})
    assert set(counts) <= allowed, dict(counts)

def in_file(dataset):
    def read(data):
        with open(path, "wb") as file:
            file.write(data)
        return list(dataset(path).as_numpy_iterator())
    return read

def compress(data, kind):
    return {"GZIP": lambda: gzip.compress(data, mtime=0), "ZLIB": lambda: zlib.compress(data), "": lambda: data}[kind]()

def image(file_format, **options):
    pixels = np.kron(np.random.default_rng(1).integers(0, 255, (3, 6, 5, 3), np.uint8), np.ones((1, 4, 4, 1), np.uint8))
    first, *others = map(Image.fromarray, pixels)
    file = io.BytesIO()
    if options.pop("frames", 0):
        options |= {"save_all": True, "append_images": others}
    first.save(file, file_format, **options)
    return file.getvalue()

def feature(kind, values):
    lists = {"bytes": tf.train.BytesList, "float": tf.train.FloatList, "int64": tf.train.Int64List}
    return tf.train.Feature(**{kind + "_list": lists[kind](value=values)})

features = tf.train.Features(feature={
    "i": feature("int64", [7, 8]), "s": feature("bytes", [b"text7"]), "f": feature("float", [1.5, 2, 3])})
example = tf.train.Example(features=features).SerializeToString()
lines = b"".join(b'%d,%.2f,"t%d"\\n' % (i, i / 2, i) for i in range(30))
"""

READERS = {
    "records": """
for kind in ("GZIP", "ZLIB", ""):
    with tf.io.TFRecordWriter(path, kind) as writer:
        for _ in range(20):
            writer.write(example * 3)
    with open(path, "rb") as file:
        # Without compression a file that is cut off between two records is whole.
        check(in_file(lambda name: tf.data.TFRecordDataset(name, kind)), file.read(), has_checksum=True, cut=bool(kind))
""",
    "lines": """
for kind in ("GZIP", "ZLIB", ""):
    data = compress(lines, kind)
    check(in_file(lambda name: tf.data.TextLineDataset(name, kind)), data, kind)
    size, types = len(lines) // 2, [tf.int32, tf.float32, tf.string]
    check(in_file(lambda name: tf.data.FixedLengthRecordDataset(name, size, compression_type=kind)), data, kind)
    check(in_file(lambda name: tf.data.experimental.CsvDataset(name, types, kind)), data, kind)
    check(lambda data: tf.io.decode_compressed(data, kind).numpy(), data, kind)
    table = compress(b"a,b,c\\n" + lines, kind)
    check(in_file(lambda name: tf.data.experimental.make_csv_dataset(
        name, 5, num_epochs=1, shuffle=False, compression_type=kind)), table, kind, times=20)
""",
    "saved dataset": """
folder = tempfile.mkdtemp()
tf.data.Dataset.range(10).save(folder)
for root, _, names in os.walk(folder):
    for name in names:
        path = os.path.join(root, name)
        whole = open(path, "rb").read()
        check(in_file(lambda name: tf.data.Dataset.load(folder)), whole, has_checksum=True, times=20)
        open(path, "wb").write(whole)
""",
    "examples": """
features = {"i": tf.io.FixedLenFeature([2], tf.int64), "s": tf.io.FixedLenFeature([], tf.string),
            "f": tf.io.VarLenFeature(tf.float32)}
check(lambda data: tf.io.parse_single_example(data, features), example, has_checksum=False, times=150)
check(lambda data: tf.io.parse_example([example, data, example], features), example, has_checksum=False, times=150)
ragged = {"i": tf.io.RaggedFeature(tf.int64), "f": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)}
check(lambda data: tf.io.parse_example([example, data], ragged), example, has_checksum=False, times=100)
parts = tf.train.FeatureList(feature=[feature("float", [1, 2]), feature("float", [3, 4])])
sequence = tf.train.SequenceExample(
    context=tf.train.Features(feature={"i": feature("int64", [7, 8])}),
    feature_lists=tf.train.FeatureLists(feature_list={"t": parts})).SerializeToString()
for kind in (tf.io.FixedLenSequenceFeature([2], tf.float32), tf.io.VarLenFeature(tf.float32)):
    check(lambda data: tf.io.parse_single_sequence_example(
        data, {"i": tf.io.FixedLenFeature([2], tf.int64)}, {"t": kind}), sequence, has_checksum=False)
""",
    "strings": """
check(lambda data: tf.io.decode_csv(data, [[0], [0.0], [""]]), b'12,3.5,"text"', has_checksum=False)
check(lambda data: tf.io.decode_raw(data, tf.int32), b"01234567", has_checksum=False)
check(lambda data: tf.io.decode_base64(data), b"aGVsbG8gd29ybGQ", has_checksum=False)
check(lambda data: tf.strings.to_number(data, tf.int32), b"1234567890", has_checksum=False)
json = b'{"features":{"feature":{"i":{"int64List":{"value":["7"]}}}}}'
check(lambda data: tf.io.decode_json_example(data), json, has_checksum=False)
for values, dtype in (([[1.0, 2.0]], tf.float32), (["a", "bcd"], tf.string)):
    data = tf.io.serialize_tensor(tf.constant(values)).numpy()
    check(lambda data: tf.io.parse_tensor(data, dtype).numpy(), data, has_checksum=False)
raises(tf.errors.InvalidArgumentError, lambda: tf.strings.to_number("99999999999", tf.int32), "could not correctly")
raises(tf.errors.InvalidArgumentError, lambda: tf.io.decode_csv("a" * 200_000, [[""]]), "larger than field limit")
""",
    "images": """
palette = io.BytesIO()
Image.open(io.BytesIO(image("PNG"))).quantize(8).save(palette, "PNG")
wide = tf.io.encode_png(tf.constant(np.arange(180).reshape(6, 10, 3) * 300, tf.uint16)).numpy()
for data, dtype in ((image("PNG"), tf.uint8), (palette.getvalue(), tf.uint8), (wide, tf.uint16)):
    check(lambda data: tf.io.decode_png(data, dtype=dtype).numpy(), data, has_checksum=True, times=100)
check(lambda data: tf.io.decode_image(data).numpy(), image("PNG"), has_checksum=True)
for file_format, decode, options in (
    ("GIF", tf.io.decode_gif, {"frames": 3}), ("GIF", tf.io.decode_image, {}), ("BMP", tf.io.decode_bmp, {}),
    ("JPEG", tf.io.decode_jpeg, {}), ("JPEG", tf.io.decode_image, {"progressive": True}),
    ("WEBP", tf.io.decode_image, {"frames": 3}), ("JPEG", tf.io.extract_jpeg_shape, {}),
):
    check(lambda data: decode(data).numpy(), image(file_format, **options), has_checksum=False, times=100)
""",
}


@pytest.mark.parametrize("inputs", READERS)
def test_damaged_inputs_give_the_undamaged_value_or_one_of_two_errors(run_tf, inputs):
    run_tf(START + READERS[inputs])


def test_a_record_of_an_impossible_length_is_a_data_loss(run_tf):
    run_tf(
        """
        import gzip, struct, tempfile
        import google_crc32c
        path = tempfile.mkdtemp() + "/records"

        def masked(data):
            checksum = google_crc32c.value(data)
            return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32

        with tf.io.TFRecordWriter(path) as writer:
            writer.write(b"whole")
        whole = open(path, "rb").read()
        for size in (40 << 30, 1 << 62, 2**64 - 1):
            length = struct.pack("<Q", size)
            for kind in ("", "GZIP"):
                content = whole + length + struct.pack("<I", masked(length)) + b"xx"
                open(path, "wb").write(gzip.compress(content) if kind else content)
                records = iter(tf.data.TFRecordDataset(path, kind))
                assert next(records) == b"whole"
                raises(tf.errors.DataLossError, lambda: next(records), "Truncated record at byte 21")
        """
    )


def test_a_large_record_is_read_whole(run_tf):
    run_tf(
        """
        import tempfile
        path = tempfile.mkdtemp() + "/records"
        records = [b"a", np.random.default_rng(0).bytes(3_000_000), b"c"]
        for kind in ("", "GZIP"):
            with tf.io.TFRecordWriter(path, kind) as writer:
                for record in records:
                    writer.write(record)
            assert list(tf.data.TFRecordDataset(path, kind).as_numpy_iterator()) == records
        """
    )


# TensorFlow 2.21 gives and refuses the same files, except for zlib's checksum in a second chunk, which it ignores.
PNG_FILES = """
import struct, zlib
pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3)).astype(np.uint8)
stream = zlib.compress(b"".join(b"\\0" + row.tobytes() for row in pixels))

def chunk(kind, data, wrong=0):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ wrong)

head = b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0))
image, end = chunk(b"IDAT", stream), chunk(b"IEND", b"")
wrong_adler = stream[:-1] + bytes([stream[-1] ^ 1])
given = {
    "as it was": head + image + end,
    "in two chunks": head + chunk(b"IDAT", stream[:99]) + chunk(b"IDAT", stream[99:]) + end,
    "a damaged text": head + chunk(b"tEXt", b"a\\0b", wrong=1) + image + end,
    "a damaged transparent color": head + chunk(b"tRNS", bytes(6), wrong=1) + image + end,
    "an unknown optional chunk": head + chunk(b"abCd", b"x") + image + end,
    "bytes after the end": head + image + end + b"more",
}
refused = {
    "a wrong checksum of the pixels": head + chunk(b"IDAT", stream, wrong=1) + end,
    "a wrong checksum of the end": head + image + chunk(b"IEND", b"", wrong=1),
    "a wrong checksum of zlib": head + chunk(b"IDAT", wrong_adler) + end,
    "a wrong checksum of zlib in a second chunk":
        head + chunk(b"IDAT", wrong_adler[:-4]) + chunk(b"IDAT", wrong_adler[-4:]) + end,
    "no end": head + image,
    "half an end": head + image + end[:-4],
    "no pixels": head + end,
    "an unknown required chunk": head + chunk(b"ABCd", b"x") + image + end,
    "too few pixels": head + chunk(b"IDAT", zlib.compress(bytes(99))) + end,
}
for name, content in given.items():
    for channels in (0, 4):
        np.testing.assert_array_equal(tf.io.decode_png(content, channels).numpy()[..., :3], pixels, name)
for name, content in refused.items():
    raises(tf.errors.InvalidArgumentError, lambda: tf.io.decode_png(content), "Invalid PNG data")
"""


def test_png_files_are_checked_as_tensorflow_does(run_tf):
    run_tf(PNG_FILES)


def test_tables_with_rows_of_another_length_are_refused(run_tf):
    run_tf(
        """
        import tempfile
        path = tempfile.mkdtemp() + "/table.csv"
        wrong_length = "CSV row 1 has 1 number of fields. Expected: 2"
        for text, words in (("a,b\\n1,2\\n3\\n", wrong_length), ("", "an empty file")):
            open(path, "w").write(text)
            raises(ValueError, lambda: tf.data.experimental.make_csv_dataset(path, 2), words)
        """
    )
