"""Which checkpoints load, as a table. In: the registry. Out: Markdown. `python -m batchgen.models.matrix` prints it for the README."""

from batchgen.models.registry import FAMILIES


def support_matrix() -> str:
    """One row per architecture, from the family modules' first lines."""
    rows = ["| architecture in config.json | family |", "|---|---|"]
    for architecture, family in FAMILIES.items():
        title = (family.__doc__ or "").split(". In:")[0]
        rows.append(f"| `{architecture}` | {title} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(support_matrix())
