"""A page opened in a browser: what it complains of, and how wide it is."""

import json
import os
import select
import shutil
import sys

from tests.support.programs import LIMIT_S, started

_NAMES = (
  *('chromium', 'chromium-browser', 'google-chrome', 'chrome'),
  'chrome-headless-shell',
)
_OPTIONS = (
  *('--headless', '--no-sandbox', '--disable-gpu', '--no-first-run'),
  *('--single-process', '--no-zygote', '--disable-dev-shm-usage'),
  *('--remote-debugging-pipe', 'about:blank'),
)
# It reads at 3 and writes at 4, whichever numbers the pipes have here.
_START = """
import os, sys
for end, place in zip(sys.argv[1:3], (3, 4)):
  os.dup2(int(end), 100 + place)
for place in (3, 4):
  os.dup2(100 + place, place)
  os.close(100 + place)
os.execv(sys.argv[3], sys.argv[3:])
"""
_MEASURE = """JSON.stringify({
  wide: document.documentElement.scrollWidth - innerWidth,
  ink: getComputedStyle(document.body).color,
  drawings: [...document.querySelectorAll('svg')].map(
    e => e.getBoundingClientRect().width)
})"""


def path():
  """Of a browser; None where there is none."""
  return next(filter(None, map(shutil.which, _NAMES)), None)


def opened(file, folder, width, scheme):
  """What a page says of itself, and what the browser says of it.

  Args:
    file: of the page.
    folder: for the browser to write into.
    width: of the window, in pixels.
    scheme: 'light' or 'dark'.

  Returns:
    What `_MEASURE` measures; and what went to the console, failed, or was asked
    for beside the page itself.
  """
  from_us, to_them = os.pipe()
  from_them, to_us = os.pipe()
  options = (*_OPTIONS[:-1], f'--user-data-dir={folder}', _OPTIONS[-1])
  pipes = str(from_us), str(to_us)
  command = [sys.executable, '-c', _START, *pipes, path(), *options]
  environment = {**os.environ, 'HOME': str(folder)}
  log = folder / 'browser.log'
  with (
    os.fdopen(to_them, 'wb', 0) as pipe,
    os.fdopen(from_them, 'rb', 0) as answers,
    log.open('w') as errors,
    started(
      command,
      pass_fds=(from_us, to_us),
      env=environment,
      stdout=errors,
      stderr=errors,
    ),
  ):
    os.close(from_us)
    os.close(to_us)
    return _Session(pipe, answers).look(file, width, scheme)


class _Session:
  """The DevTools protocol over a pipe: JSON, each ended by a null byte."""

  def __init__(self, pipe, answers):
    self.pipe, self.answers, self.rest = pipe, answers, b''
    self.number, self.session, self.events = 0, None, []

  def look(self, file, width, scheme):
    targets = self.call('Target.getTargets')['targetInfos']
    target = next(x['targetId'] for x in targets if x['type'] == 'page')
    options = {'targetId': target, 'flatten': True}
    attached = self.call('Target.attachToTarget', **options)
    self.session = attached['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.call(f'{domain}.enable')
    feature = {'name': 'prefers-color-scheme', 'value': scheme}
    self.call('Emulation.setEmulatedMedia', features=[feature])
    size = {'width': width, 'height': 800, 'deviceScaleFactor': 1}
    self.call('Emulation.setDeviceMetricsOverride', mobile=False, **size)
    self.events.clear()
    self.call('Page.navigate', url=file.as_uri())
    while not any(x['method'] == 'Page.loadEventFired' for x in self.events):
      self.events.append(self.read())
    answer = self.call('Runtime.evaluate', expression=_MEASURE)
    complaints = [x for x in self.events if _complains(x, file.as_uri())]
    return json.loads(answer['result']['value']), complaints

  def call(self, method, **parameters):
    """Calls a method, and keeps the events that come before its answer."""
    self.number += 1
    message = {'id': self.number, 'method': method, 'params': parameters}
    if self.session:
      message['sessionId'] = self.session
    self.pipe.write(json.dumps(message).encode() + b'\0')
    while (answer := self.read()).get('id') != self.number:
      self.events.append(answer)
    return answer['result']

  def read(self):
    while b'\0' not in self.rest:
      ready, _, _ = select.select([self.answers], [], [], LIMIT_S)
      assert ready, 'the browser says nothing'
      more = self.answers.read(1 << 16)
      assert more, 'the browser ended'
      self.rest += more
    message, _, self.rest = self.rest.partition(b'\0')
    return json.loads(message)


def _complains(event, page):
  method, parameters = event['method'], event.get('params', {})
  asked = parameters.get('request', {}).get('url', page)
  return (
    method in ('Runtime.consoleAPICalled', 'Runtime.exceptionThrown')
    or method in ('Log.entryAdded', 'Network.loadingFailed')
    or (method == 'Network.requestWillBeSent' and asked != page)
  )
