"""`tf.train.Example` and its kin, and `TensorProto`: classes of the library protobuf, whose fields are written here.

The messages are TensorFlow's, with its field numbers, so that serialized ones are the same bytes. They lie in a pool of
their own: TensorFlow and tensorboardX, which define messages of the same names, may be imported in the same process.
"""

from __future__ import annotations

from typing import Any

from replicax.tf._core import doc_pages

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError as DecodeError
except ImportError as error:
    raise ImportError(
        f"tf.train.Example and other messages need protobuf: {doc_pages.install('data')}.", name="google.protobuf"
    ) from error

# Of each message the fields: a number, a type, and a name. "*" is a repeated field, "{}" a map from strings, and fields
# after "|" are alternatives of each other.
_MESSAGES = {
    "BytesList": "1 bytes* value",
    "FloatList": "1 float* value",
    "Int64List": "1 int64* value",
    "Feature": "| kind, 1 BytesList bytes_list, 2 FloatList float_list, 3 Int64List int64_list",
    "Features": "1 Feature{} feature",
    "FeatureList": "1 Feature* feature",
    "FeatureLists": "1 FeatureList{} feature_list",
    "Example": "1 Features features",
    "SequenceExample": "1 Features context, 2 FeatureLists feature_lists",
    "TensorShapeProto": "2 Dim* dim, 3 bool unknown_rank",
    "Dim": "1 int64 size, 2 string name",
    "TensorProto": """1 int32 dtype, 2 TensorShapeProto tensor_shape, 3 int32 version_number, 4 bytes tensor_content,
        5 float* float_val, 6 double* double_val, 7 int32* int_val, 8 bytes* string_val, 9 float* scomplex_val,
        10 int64* int64_val, 11 bool* bool_val, 12 double* dcomplex_val, 13 int32* half_val, 16 uint32* uint32_val,
        17 uint64* uint64_val""",
}
_PACKAGE = "tensorflow"
# The classes, which are made below.
BytesList: Any
Example: Any
Feature: Any
FeatureList: Any
SequenceExample: Any
TensorProto: Any
_Field = descriptor_pb2.FieldDescriptorProto


def _file() -> Any:
    """Returns the description of all messages, as protoc would make it of their source."""
    file = descriptor_pb2.FileDescriptorProto(name="replicax/messages.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            _add(message, field.split())
    return file


def _add(message: Any, words: list[str]) -> None:
    if words[0] == "|":
        message.oneof_decl.add(name=words[1])
        return
    number, kind, name = int(words[0]), words[1], words[2]
    repeated = kind.endswith(("*", "{}"))
    field = message.field.add(name=name, number=number, label=3 if repeated else 1)
    if message.oneof_decl:
        field.oneof_index = 0
    if kind.endswith("{}"):
        # A map is a repeated message of a key and a value.
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add(entry, ["1", "string", "key"])
        _add(entry, ["2", kind.removesuffix("{}"), "value"])
        kind = f"{message.name}.{entry.name}"
    kind = kind.removesuffix("*")
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())
for _name in _MESSAGES:
    globals()[_name] = message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{_name}"))
