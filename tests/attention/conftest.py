"""Let shared checks explain themselves when they fail."""

import pytest

pytest.register_assert_rewrite("checks", "matrix", "score_checks")
