"""The pages in a browser: no complaint, no request, nothing wider than it."""

import pytest

from experiments.reproduce import page
from tests.reproduce import browser, drawn

pytestmark = pytest.mark.skipif(
  browser.path() is None, reason='no Chromium on the PATH'
)


@pytest.fixture(scope='module')
def report(tmp_path_factory):
  folder = tmp_path_factory.mktemp('report')
  drawn.fill(folder, models=('rm2',), failed=[('rm2', 'fae', 'off', None)])
  page.write(folder)
  return folder / page.HTML


@pytest.mark.parametrize(('width', 'scheme'), [(360, 'light'), (1200, 'dark')])
def test_a_report_opens_without_complaint(report, width, scheme, tmp_path):
  measured, complaints = browser.opened(report, tmp_path, width, scheme)
  assert complaints == []
  assert measured['wide'] <= 0
  assert len(measured['drawings']) == 7
  assert all(250 < drawing <= width for drawing in measured['drawings'])
  dark = measured['ink'] != 'rgb(29, 39, 51)'
  assert dark == (scheme == 'dark')


def test_what_a_page_complains_of_is_seen(tmp_path):
  bad = tmp_path / 'bad.html'
  bad.write_text(
    '<p style="width:900px">x<img src="none.png"><script>x.y</script>'
  )
  measured, complaints = browser.opened(bad, tmp_path, 360, 'light')
  said = {event['method'] for event in complaints}
  assert {'Runtime.exceptionThrown', 'Network.loadingFailed'} <= said
  assert measured['wide'] > 0
