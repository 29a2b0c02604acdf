"""Authorization of requests to a review: by a token in the path, the Host header and the Origin header."""

import hmac

from starlette.datastructures import Headers

from finetune.serving.guard import Check, host_name, is_loopback
from finetune.serving.refusal import Refused
from finetune.system.messages import shown


def review_check(token: str) -> Check:
    """Return the check of a review, which refuses requests that do not come from its page.

    - The first part of the path must be the token, which only the terminal shows.
    - The Host header must name the loopback. Otherwise a web page could point its own name at 127.0.0.1.
    - A request that changes something must have the page's origin and a JSON body. Other pages cannot send both.
    """

    def check(method: str, path: str, headers: Headers) -> Refused | None:
        host = headers.get("host", "")
        if not is_loopback(host_name(host)):
            return Refused(403, f"a review answers to localhost, not to {shown(host_name(host))!r}")
        sent = path[1:].partition("/")[0]
        if not hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode()):
            return Refused(
                403, "the token is missing or wrong: open the address that finetune review printed"
            )
        if method in ("GET", "HEAD"):
            return None
        if headers.get("origin") != f"http://{host}":
            return Refused(403, "the request does not come from the page of the review")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return Refused(415, "the body must be JSON: application/json")
        return None

    return check
