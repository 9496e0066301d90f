"""Local steps: replicas that train on their own and synchronise their weights now and then."""
