"""The scripts of the demo's trainers, each as a user would write it."""
