"""What is known before anything is planned: devices, links, and what each layer costs."""
