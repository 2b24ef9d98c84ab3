"""The server of the Model Context Protocol: what coding agents ask a store, and how they train into it.

command      the command `cope-sweep mcp`
server       the protocol: tools, resources, errors, and the two transports
questions    the tools that read: one for each question of `cope_sweep.api`, and models
actions      the tools that check, plan, train, wait and stop
training     sweeps in the background, and their budget
resources    the schema of ablation files, encodings and tasks, and committed results
answers      answers as Markdown that fits a context
"""
