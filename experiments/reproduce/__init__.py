"""The paper's comparison, run side by side, and its report."""
