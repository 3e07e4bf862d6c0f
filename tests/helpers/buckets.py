"""Object stores on loopback that fail on purpose: moto's S3, and a small GCS, behind a layer that injects faults and counts requests.

`python buckets.py s3|gs` prints its port and serves until it ends. A POST to /_faults replaces the faults: {"error": 0.1, "lost": 0.02,
"stall": 0.01, "after": N, "kind": ..., "status": ...} are the shares of requests that are answered by 500 or 503, done without an answer,
or not answered; `after` and `kind` instead break one request, the N-th from now on. /_log has what was asked for since the last /_faults.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, unquote

STALL_SECONDS = 4
NAME = "bucket"


class Faulty:
    """A WSGI application in front of another one."""

    def __init__(self, app):
        self._app, self._lock, self._chance = app, threading.Lock(), random.Random(0)
        self._rates, self._count, self._log = {}, 0, []

    def __call__(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if path == "/_faults":
            with self._lock:
                self._rates, self._count, self._log = json.loads(body), 0, []
            return answered(start_response, b"{}")
        if path == "/_log":
            return answered(start_response, json.dumps(self._log).encode())
        fault, code = self._fault()
        if fault == "stall":
            time.sleep(STALL_SECONDS)
            raise ConnectionError
        if fault == "error":
            start_response(code, [("Content-Type", "application/xml"), ("Content-Length", "0")])
            return [b""]
        results, begun = [], []
        environ["wsgi.input"] = Body(body)
        if method in ("PUT", "POST", "DELETE"):
            # The conditions are looked at before the write, not with it.
            with self._lock:
                results += self._app(environ, lambda *args: begun.append(args))
        else:
            results += self._app(environ, lambda *args: begun.append(args))
        size = sum(map(len, results))
        conditions = {name: value for name, value in environ.items() if name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")}
        self._log.append([method, path, len(body), size, begun[0][0], conditions])
        if fault == "lost":
            raise ConnectionError
        start_response(*begun[0])
        return results

    def _fault(self):
        with self._lock:
            rates = self._rates
            self._count += 1
            code = rates.get("status", self._chance.choice(["503 Slow Down", "500 Internal Server Error"]))
            if "kind" in rates:
                return (rates["kind"] if self._count == rates["after"] or rates.get("always") else None), code
            draw = self._chance.random()
            for kind in ("error", "lost", "stall"):
                if (draw := draw - rates.get(kind, 0)) < 0:
                    return kind, code
        return None, None


class Body:
    """A request's body that was read already."""

    def __init__(self, content):
        self._content = content

    def read(self, size=-1):
        part, self._content = (self._content, b"") if size < 0 else (self._content[:size], self._content[size:])
        return part

    def readline(self, size=-1):
        return self.read(size)


def answered(start_response, body, status="200 OK", headers=()):
    start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/json"), *headers])
    return [body]


class Gcs:
    """The part of GCS's JSON API that TensorStore uses, with generations."""

    def __init__(self):
        self._objects, self._count = {}, 0

    def __call__(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
        raw = environ.get("RAW_URI") or environ.get("REQUEST_URI") or path
        name = query.get("name") or unquote(raw.partition("?")[0].partition("/o/")[2])
        generation, content = self._objects.get(name, (0, b""))
        wanted, unwanted = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
        if wanted is not None and int(wanted) != generation:
            return answered(start_response, b"{}", "412 Precondition Failed")
        if method == "GET" and path.endswith("/o"):
            names = sorted(key for key in self._objects if key.startswith(query.get("prefix", "")))
            begin = query.get("startOffset", query.get("pageToken", ""))
            names = [key for key in names if begin <= key < query.get("endOffset", "\U0010ffff")]
            items = [{"name": key, "generation": str(self._objects[key][0]), "size": str(len(self._objects[key][1]))} for key in names]
            return answered(start_response, json.dumps({"items": items}).encode())
        if method == "POST":
            self._count += 1
            self._objects[name] = self._count, environ["wsgi.input"].read()
            return answered(start_response, json.dumps(self._metadata(name)).encode())
        if not generation:
            return answered(start_response, b"{}", "404 Not Found")
        if method == "DELETE":
            del self._objects[name]
            return answered(start_response, b"", "204 No Content")
        if unwanted is not None and int(unwanted) == generation:
            return answered(start_response, b"", "304 Not Modified")
        if query.get("alt") != "media":
            return answered(start_response, json.dumps(self._metadata(name)).encode())
        headers = [("x-goog-generation", str(generation))]
        if "HTTP_RANGE" not in environ:
            return answered(start_response, content, headers=headers)
        begin, end = environ["HTTP_RANGE"].removeprefix("bytes=").split("-")
        part = content[int(begin) : int(end or len(content)) + 1]
        place = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
        return answered(start_response, part, "206 Partial Content", [*headers, ("Content-Range", place)])

    def _metadata(self, name):
        return {"name": name, "generation": str(self._objects[name][0]), "size": str(len(self._objects[name][1])), "bucket": NAME}


def application(kind):
    if kind == "gs":
        return Gcs()
    from moto.server import create_backend_app

    return create_backend_app("s3")


class Server:
    """A server in a process of its own."""

    def __init__(self, kind):
        self._child = subprocess.Popen([sys.executable, __file__, kind], stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://127.0.0.1:{int(self._child.stdout.readline())}"
        self.url = f"{'gs' if kind == 'gs' else 's3'}://{NAME}"
        self.environment = {
            "s3": {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"},
            "gs": {"STORAGE_EMULATOR_HOST": self.endpoint, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "a"},
        }[kind]
        # Shorter than the limit of a run, so that many stalls take little time.
        self.environment["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "2"
        if kind == "s3":
            self._request("/bucket", "PUT")

    def faults(self, **rates):
        self._request("/_faults", "POST", json.dumps(rates).encode())

    def log(self):
        """The requests since the faults were set: method, path, bytes sent and received, status, conditions."""
        return json.loads(self._request("/_log"))

    def close(self):
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()

    def _request(self, path, method="GET", body=None):
        with urllib.request.urlopen(urllib.request.Request(self.endpoint + path, data=body, method=method)) as answer:
            return answer.read()


def main():
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_):
            pass

    server = make_server("127.0.0.1", 0, Faulty(application(sys.argv[1])), threaded=True, request_handler=Quiet)
    parent = os.getppid()
    print(server.port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # It ends with the tests that have started it.
    while os.getppid() == parent and Path("/proc/self").exists():
        time.sleep(1)


if __name__ == "__main__":
    main()
