"""The command `jgt serve`: a model behind the HTTP API of OpenAI.

`api_request.py` reads what a client asks for, `engine.py` has the one thread that runs the model, `reply.py` writes the JSON of answers,
`app.py` is the API as an ASGI application, `server.py` runs it, and `__main__.py` is the door.
"""
