"""What answers the side panel: its routes, the state that it shows, and what its benchmark queues."""
