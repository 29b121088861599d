"""The table: what users write, with small inputs. `test_table.py` runs every line over every layout of its inputs."""

from __future__ import annotations

from table_models import MODELS
from table_pointwise import POINTWISE
from table_products import PRODUCTS
from table_select import SELECT
from table_shapes import SHAPES
from table_transforms import TRANSFORMS

CASES = [*POINTWISE, *SHAPES, *SELECT, *PRODUCTS, *TRANSFORMS, *MODELS]
