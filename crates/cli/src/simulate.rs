//! `anyverbs simulate`: a network in virtual time.

use std::process::ExitCode;

use anyhow::{Context, anyhow};
use anyverbs::config::read_text;
use anyverbs_fabric::{Plan, report};

use crate::args::Simulate;
use crate::write_out;

/// Runs the settings, and prints what became of the messages.
pub(crate) fn print(args: &Simulate) -> anyhow::Result<ExitCode> {
    let file = args.file.display();
    let text = read_text(&args.file).with_context(|| format!("cannot read {file}"))?;
    let mut plan = Plan::parse(&text).map_err(|reason| anyhow!("{file}: {reason}"))?;
    plan.seed = args.seed.unwrap_or(plan.seed);
    if !args.compare {
        plan.settings = vec![("as given".to_owned(), plan.transport)];
    }
    let outcomes: Vec<_> =
        plan.settings.iter().map(|(name, transport)| plan.run(name, *transport)).collect();
    if let Some(path) = &args.plot {
        std::fs::write(path, report::plot(&plan, &outcomes))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let said = if args.json {
        report::json(&plan, &outcomes)
    } else {
        let (table, verdict) = (report::table(&outcomes), report::verdict(&outcomes));
        format!("{}\n\n{table}\n{verdict}", plan.summary())
    };
    let written = write_out(said.as_bytes())?;
    let is_any_whole = outcomes.iter().any(|outcome| outcome.failed == 0);
    Ok(if is_any_whole { written } else { ExitCode::FAILURE })
}
