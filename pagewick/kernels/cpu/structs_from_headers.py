"""Write structs.py, the Python side of the library's C ABI: `make structs`.

The headers are the only source of argument structs and enums, and ops.cpp is that of the list of operations. Like the
build, this needs no installed package. It reads simple declarations only: a struct whose name ends in Args has one
field a line, which is a pointer, a number, an enum of 32 bits or another such struct; comments are of the `//` kind.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
OUTPUT = Path(__file__).parent / "structs.py"
# Constants of the headers that Python needs as well.
CONSTANTS = ("kAbiVersion", "kMaxStreams", "kPanelRows")
WIDTH = 120

# C type -> annotation
NUMBERS = {"int32_t": "Int32", "int64_t": "Int64", "float": "Float", "double": "Double"}

HEAD = '''"""Generated from csrc/*.h and csrc/ops.cpp by structs_from_headers.py; `make structs` writes it anew.

Arguments are given by name. mypy knows their names and types; a name that a struct does not have raises AttributeError.
"""

# fmt: off
# ruff: noqa: E702
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from types import new_class
from typing import Annotated, TypeVar, dataclass_transform, get_type_hints

Address = Annotated[int | None, c_void_p]
Int32 = Annotated[int, c_int32]
Int64 = Annotated[int, c_int64]
Float = Annotated[float, c_float]
Double = Annotated[float, c_double]

_Struct = TypeVar("_Struct", bound=Structure)


@dataclass_transform(kw_only_default=True)
def laid_out(struct: type[_Struct]) -> type[_Struct]:
    """Make the struct that is annotated: its fields, and no place for other names."""
    hints = get_type_hints(struct, include_extras=True).items()
    fields = [(name, getattr(hint, "__metadata__", (hint,))[0]) for name, hint in hints]
    members = {"__slots__": (), "_fields_": fields, "__module__": __name__}
    return new_class(struct.__name__, (Structure,), exec_body=lambda namespace: namespace.update(members))

'''


def generate(source_dir: Path = SOURCE_DIR) -> str:
    """Return the text of structs.py. Raises ValueError for a declaration that this cannot read."""
    headers = _in_order_of_use({path.name: _without_comments(path.read_text()) for path in source_dir.glob("*.h")})
    operations = _without_comments((source_dir / "ops.cpp").read_text())
    text = "\n".join(headers)
    enums, structs = list(_enums(text)), list(_structs(text))
    types = NUMBERS | {name: "Int32" for name, _ in enums} | {name: name for name, _ in structs}
    constants = {name: re.search(rf"constexpr \w+ {name} = (\d+);", text) for name in CONSTANTS}
    if missing := [name for name, found in constants.items() if found is None]:
        raise ValueError(f"no header defines {missing[0]} as a plain number")
    parts = [HEAD + "\n".join(f"{snake_case(name)} = {found[1]}" for name, found in constants.items() if found)]
    parts += [f"class {name}(IntEnum):\n{_wrapped(values, ';')}" for name, values in enums]
    parts += [_struct_class(name, fields, types) for name, fields in structs]
    parts.append(_operation_table(operations, {name for name, _ in structs}))
    return "\n\n".join(parts) + "\n"


def snake_case(name: str) -> str:
    """Return a C++ constant in the spelling of Python: kSumOfTwo -> SUM_OF_TWO."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _in_order_of_use(headers: dict[str, str]) -> list[str]:
    """Sort headers by name, but each after the headers that it includes."""
    ordered: dict[str, str] = {}

    def take(name: str) -> None:
        if name in headers and name not in ordered:
            for included in re.findall(r'#include "([\w.]+)"', headers[name]):
                take(included)
            ordered[name] = headers[name]

    for name in sorted(headers):
        take(name)
    return list(ordered.values())


def _enums(text: str) -> Iterator[tuple[str, list[str]]]:
    for name, values in re.findall(r"enum (?:class )?(\w+) : int32_t \{([^}]*)\}", text):
        yield name, [f"{snake_case(constant)} = {value}" for constant, value in re.findall(r"(\w+) = (\d+)", values)]


def _structs(text: str) -> Iterator[tuple[str, list[tuple[str, bool, str]]]]:
    """Yield name and fields. A field is its C type, whether it is a pointer, and its name."""
    for name, body in re.findall(r"struct (\w+Args) \{(.*?)\n\};", text, re.DOTALL):
        fields = []
        for line in filter(str.strip, body.splitlines()):
            found = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (\w+);\s*", line)
            if found is None:
                raise ValueError(f"{name} has a field that cannot be read: {line.strip()}")
            fields.append((found[1], bool(found[2]), found[3]))
        yield name, fields


def _struct_class(name: str, fields: list[tuple[str, bool, str]], types: dict[str, str]) -> str:
    for c_type, is_pointer, field in fields:
        if not is_pointer and c_type not in types:
            raise ValueError(f"{name}.{field} has a type that has no counterpart in Python: {c_type}")
    members = [f"{field}: {'Address' if is_pointer else types[c_type]}" for c_type, is_pointer, field in fields]
    return f"@laid_out\nclass {name}(Structure):\n{_wrapped(members, ';')}"


def _operation_table(text: str, structs: set[str]) -> str:
    entries = []
    for name, struct in re.findall(r"PW_(?:OPERATION|ADVANCING|EXPECTED)\((\w+), (\w+)(?:, \w+)?\),", text):
        if struct not in structs:
            raise ValueError(f"operation {name} takes {struct}, which no header declares")
        entries.append(f'"{name}": {struct}')
    table = "OPERATIONS: dict[str, type[Structure]] = {"
    return "\n".join(("# The argument struct of each operation.", table, _wrapped(entries, ","), "}"))


def _wrapped(items: list[str], separator: str) -> str:
    """Return the items on as few lines as possible, with separators between those on a line."""
    # A line breaks at spaces only, and not at those that do not break.
    text = f"{separator} ".join(item.replace(" ", "\xa0") for item in items)
    lines = textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(line.replace("\xa0", " ").removesuffix(";") for line in lines)


if __name__ == "__main__":
    OUTPUT.write_text(generate())
    print(f"wrote {OUTPUT}")
