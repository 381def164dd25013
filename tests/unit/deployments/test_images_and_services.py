"""The image, compose and systemd files name things that exist, and carry no secret."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "deployments" / "images" / "Dockerfile"
COMPOSE = ROOT / "deployments" / "services" / "compose.yaml"
UNITS = sorted((ROOT / "deployments" / "services").glob("*.service"))


def test_everything_the_image_copies_exists_and_is_let_through() -> None:
    allowed = {line[1:] for line in Path(f"{IMAGE}.dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in IMAGE.read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source in allowed, source


def test_the_image_pins_what_the_recipes_need() -> None:
    text = IMAGE.read_text()
    assert "SGLANG_BRANCH=sglang-miles-kimi-k31" in text
    assert "SGLANG_COMMIT=35708f7" in text
    assert "--frozen" in text
    assert "K31_IMAGE_VERSION=${VERSION}" in text


def test_compose_waits_for_its_parts_and_asks_for_every_secret() -> None:
    tree = yaml.safe_load(COMPOSE.read_text())
    services = tree["services"]
    assert set(services) == {"postgres", "server", "worker"}
    assert services["server"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["worker"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert services["server"]["ports"] == ["127.0.0.1:4200:4200"]
    for name, value in services["postgres"]["environment"].items():
        if "PASSWORD" in name:
            assert re.fullmatch(r"\$\{K31_DB_PASSWORD:\?.*\}", value)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_run_programs_of_the_image(unit: Path) -> None:
    text = unit.read_text()
    for section in ("[Unit]", "[Service]", "[Install]"):
        assert text.count(section) == 1
    programs = re.findall(r"^Exec\w+=(\S+)", text, re.MULTILINE)
    assert programs
    assert all(program.startswith("/opt/k31/.venv/bin/") for program in programs)
    assert not re.search(r"(?i)(password|token|key)\s*=\s*[^/$\s][^\s]*", text.replace("RAY_AUTH_MODE=token", ""))
