"""What a step of a random program can be: importing this fills the table."""

from . import indexing, mutations, pointwise, products, reductions, views
from .table import OPERATIONS

__all__ = ["OPERATIONS", "indexing", "mutations", "pointwise", "products", "reductions", "views"]
