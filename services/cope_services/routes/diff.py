"""Routes that compare runs: differences, and curves of several runs."""

from fastapi import APIRouter

from cope_services.access import READ
from cope_services.cached_route import RunFilesRoute
from cope_services.questions import add_questions
from cope_sweep.api.questions import CompareCurves, GetDifference

router = APIRouter(tags=["runs"], dependencies=[READ], responses={304: {}}, route_class=RunFilesRoute)
add_questions(router, GetDifference, CompareCurves)
