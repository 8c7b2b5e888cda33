"""The words for people of settings, metrics, conditions and causes: the docstrings below their fields."""

import ast
import inspect
from functools import cache
from itertools import pairwise


@cache
def docstrings_of_fields(kind: type) -> dict[str, list[str]]:
    """Return the paragraphs of the docstring below each field of a class, by the field's name."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    texts: dict[str, list[str]] = {}
    for field, below in pairwise(ast.iter_child_nodes(definition)):
        if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            paragraphs = inspect.cleandoc(ast.literal_eval(below.value)).split("\n\n")
            texts[ast.unparse(target)] = [" ".join(lines.split()) for lines in paragraphs]
    return texts
