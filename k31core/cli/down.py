"""`k31 down`: stop everything that k31 started."""


def down() -> None:
    """Stop the deployments' worker, Ray with its actors, and the Prefect server; only those that k31 started."""
    from k31core.cluster.home import find_home
    from k31core.cluster.services import stop_services

    home = find_home()
    counts = stop_services(home)
    for service, count in counts.items():
        print(f"{service}: {f'stopped {count} processes' if count else 'was not running'}")
