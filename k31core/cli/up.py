"""`k31 up`: local services and the deployments."""

from pathlib import Path
from typing import Annotated

import typer


def up(
    write_profile: Annotated[
        bool, typer.Option("--write-profile", help="Also write PREFECT_API_URL to the active Prefect profile.")
    ] = False,
    save_dir: Annotated[Path, typer.Option(help="Where deployed runs make their run directories.")] = Path("runs"),
    num_cpus: Annotated[int, typer.Option(help="CPUs that the local Ray head offers.")] = 2,
    num_gpus: Annotated[int, typer.Option(help="GPUs that the local Ray head offers.")] = 0,
    prefect_port: Annotated[int | None, typer.Option(help="Port of the Prefect server; chosen when left out.")] = None,
    ray_port: Annotated[int | None, typer.Option(help="Port of the Ray head; chosen when left out.")] = None,
    notify_block: Annotated[
        str | None,
        typer.Option(help="Notification block (`slack-webhook/team`) told about ended runs; `none` ends it."),
    ] = None,
) -> None:
    """Start a Prefect server and Ray on loopback where none is running, apply the deployments, and serve them.

    Prints the PREFECT_API_URL that plain `prefect` commands need. Everything stays up until `k31 down`.
    """
    from k31core.cli.deploy import apply_deployments, start_worker, write_api_url
    from k31core.cli.main import print_note
    from k31core.cluster.home import find_home
    from k31core.cluster.services import ServiceOptions, connect_environment, ensure_services

    home = find_home()
    options = ServiceOptions(prefect_port=prefect_port, ray_port=ray_port, num_cpus=num_cpus, num_gpus=num_gpus)
    endpoints = ensure_services(home, options, print_note)
    connect_environment(home, endpoints)
    apply_deployments(home, save_dir.absolute(), notify_block, print_note)
    start_worker(home, print_note)
    if write_profile:
        write_api_url(endpoints.prefect_url)
    print_note(f"Prefect UI  {endpoints.prefect_url.removesuffix('/api')}")
    print_note("run         prefect deployment run k31/train")
    print(f"export PREFECT_API_URL={endpoints.prefect_url}")
