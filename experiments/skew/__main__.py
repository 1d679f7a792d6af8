"""Compares the skew of the synthetic proxies with what the papers print.

    python -m experiments.skew [--proxy=NAME] [--seed=0] [--workdir=DIR]
        [--samples=DIR]

A part of a proxy's stream shows which rows of all its tables are looked up
most. Those are hot, up to the published share of the tables' bytes. Rows of
equal counts come in random order. Another part of the stream is judged: an
example is hot if all its lookups are. --workdir keeps skew.json and
access_curves.png: the lookups of each row against its rank. Real samples under
--samples are drawn beside them (criteo/dac_80k.tsv.gz, avazu/train.csv and
taobao/UserBehavior.csv.gz).
"""

from absl import flags

from experiments.common import cli


def main() -> None:
  """Measures, prints, and writes what --workdir asks for.

  Raises:
    UserError: a flag is invalid, or a sample is missing.
  """
  from experiments.common import record, report
  from experiments.common.workdir import writable
  from experiments.screen.bar import Bar
  from experiments.skew import measure

  asked, screen = flags.FLAGS, report.console()
  proxies = measure.chosen(asked.proxy, asked.seed)
  samples = measure.samples_in(asked.samples, list(proxies))
  skews = {}
  with Bar(screen, None, 'example') as bar:
    for name, proxy in proxies.items():
      examples = proxy.profile_examples + measure.JUDGED
      bar.begin(f'{len(skews) + 1}/{len(proxies)} {name}', examples)
      skews[name] = measure.measured(proxy, tell=bar.show)
  frame = measure.frame_of(skews)
  screen.print(report.table('hot rows and hot examples', frame))
  if asked.workdir:
    folder = writable(asked.workdir, '--workdir')
    record.write_json(folder / 'skew.json', frame)
    measure.plot(folder / 'access_curves.png', skews, samples)
    report.teller(screen)(f'written to {folder}')


if __name__ == '__main__':
  flags.DEFINE_multi_string(
    'proxy', [], 'Proxy to measure; may be given again. All by default.'
  )
  flags.DEFINE_integer('seed', 0, 'Seed of the streams.')
  flags.DEFINE_string(
    'workdir', None, 'Folder for skew.json and access_curves.png.'
  )
  flags.DEFINE_string('samples', None, 'Folder with real samples.')
  cli.run(main, config='none', kept='nothing was written')
