//! `cargo xtask deny`: licences, sources and doubled versions of the project's dependencies, by the rules of
//! `deny.toml`, without a network. Cargo-deny looks up known vulnerabilities, if it is installed and gets through.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::conformance::Tally;
use crate::workspace::{cargo, root};

/// The part of `deny.toml` that is checked here.
#[derive(Debug, Deserialize)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

#[derive(Debug, Deserialize)]
struct Skip {
    /// `name@version`, or a prefix of it.
    #[serde(rename = "crate")]
    spec: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: BTreeSet<String>,
}

/// The output of `cargo metadata`.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Clone, Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// None for our own.
    source: Option<String>,
}

/// Checks, and fails if something is denied.
pub(crate) fn run() -> anyhow::Result<()> {
    let tally = run_counted()?;
    if tally.failed > 0 {
        bail!("{} of the checks failed", tally.failed);
    }
    Ok(())
}

/// The same, counted: one for each workspace, and one for the vulnerabilities.
pub(crate) fn run_counted() -> anyhow::Result<Tally> {
    let path = root().join("deny.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path:?}"))?;
    let rules: Rules = toml::from_str(&text).with_context(|| format!("{path:?}"))?;
    let mut tally = Tally::default();
    for manifest in ["Cargo.toml", "fuzz/Cargo.toml"] {
        let packages = packages(&root().join(manifest))?;
        let findings = rules.findings(&packages);
        for finding in &findings {
            println!("FAIL {manifest}: {finding}");
        }
        if findings.is_empty() {
            println!(
                "ok   {manifest}: licences, sources and versions of {} crates",
                packages.len()
            );
            tally.passed += 1;
        } else {
            tally.failed += 1;
        }
    }
    tally += advisories()?;
    Ok(tally)
}

/// Known vulnerabilities. Their list is on the network: where it cannot be had, the check is skipped, and says so.
fn advisories() -> anyhow::Result<Tally> {
    let quiet = |arguments: &[&str]| {
        cargo().args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status()
    };
    if !quiet(&["deny", "--version"]).is_ok_and(|status| status.success()) {
        println!("skip advisories: cargo-deny is not installed, so nothing was looked up");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    if !quiet(&["deny", "fetch", "db"]).is_ok_and(|status| status.success()) {
        println!("skip advisories: the list cannot be had from here, so nothing was looked up");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let found = cargo().args(["deny", "check", "advisories"]).status().context("cargo deny")?;
    Ok(match found.success() {
        true => Tally { passed: 1, ..Tally::default() },
        false => Tally { failed: 1, ..Tally::default() },
    })
}

fn packages(manifest: &Path) -> anyhow::Result<Vec<Package>> {
    let output = cargo()
        .args(["metadata", "--format-version", "1", "--all-features", "--locked"])
        .arg("--manifest-path")
        .arg(manifest)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed ({}): is Cargo.lock up to date?", output.status);
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    Ok(metadata.packages)
}

impl Rules {
    fn findings(&self, packages: &[Package]) -> Vec<String> {
        let mut findings = Vec::new();
        let mut versions: BTreeMap<&str, Vec<&Package>> = BTreeMap::new();
        for package in packages {
            let name = format!("{} {}", package.name, package.version);
            match &package.license {
                None => findings.push(format!("{name} has no licence")),
                Some(expression) if !self.is_allowed(expression) => {
                    findings.push(format!("{name} may be used by {expression} only"));
                }
                Some(_) => {}
            }
            if let Some(source) = &package.source {
                let registry = source.strip_prefix("registry+");
                if !registry.is_some_and(|url| self.sources.allow_registry.contains(url)) {
                    findings.push(format!("{name} comes from {source}"));
                }
            }
            if !self.bans.skip.iter().any(|skip| skip.matches(package)) {
                versions.entry(&package.name).or_default().push(package);
            }
        }
        for (name, several) in versions.iter().filter(|(_, several)| several.len() > 1) {
            let versions: Vec<_> = several.iter().map(|p| p.version.as_str()).collect();
            findings.push(format!("{name} is there as {}", versions.join(" and ")));
        }
        findings
    }

    /// Tells whether the allowed licences can meet an SPDX expression.
    fn is_allowed(&self, expression: &str) -> bool {
        let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
        let words: Vec<_> = spaced.split_whitespace().collect();
        let mut rest = words.as_slice();
        let met = self.alternatives(&mut rest);
        met && rest.is_empty()
    }

    fn alternatives(&self, words: &mut &[&str]) -> bool {
        let mut met = self.conjunction(words);
        while let ["OR", rest @ ..] = *words {
            *words = rest;
            met |= self.conjunction(words);
        }
        met
    }

    fn conjunction(&self, words: &mut &[&str]) -> bool {
        let mut met = self.term(words);
        while let ["AND", rest @ ..] = *words {
            *words = rest;
            met &= self.term(words);
        }
        met
    }

    fn term(&self, words: &mut &[&str]) -> bool {
        match *words {
            ["(", rest @ ..] => {
                *words = rest;
                let met = self.alternatives(words);
                let ([")", rest @ ..] | rest) = *words;
                *words = rest;
                met
            }
            [name, "WITH", exception, rest @ ..] => {
                *words = rest;
                self.licenses.allow.contains(&format!("{name} WITH {exception}"))
            }
            [name, rest @ ..] => {
                *words = rest;
                self.licenses.allow.contains(*name)
            }
            [] => false,
        }
    }
}

impl Skip {
    fn matches(&self, package: &Package) -> bool {
        let Some((name, version)) = self.spec.split_once('@') else {
            return self.spec == package.name;
        };
        let rest = package.version.strip_prefix(version);
        name == package.name && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        toml::from_str(include_str!("../../deny.toml")).unwrap()
    }

    fn package(name: &str, version: &str, license: &str) -> Package {
        Package {
            name: name.into(),
            version: version.into(),
            license: Some(license.into()),
            source: Some("registry+https://github.com/rust-lang/crates.io-index".into()),
        }
    }

    #[test]
    fn licences_are_expressions() {
        for (expression, allowed) in [
            ("MIT", true),
            ("MIT/Apache-2.0", true),
            ("GPL-2.0", false),
            ("GPL-2.0 OR MIT", true),
            ("GPL-2.0 AND MIT", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(MIT OR Apache-2.0) AND GPL-3.0", false),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
            ("GPL-2.0 WITH Classpath-exception-2.0", false),
            ("MIT MIT", false),
            ("", false),
        ] {
            assert_eq!(rules().is_allowed(expression), allowed, "{expression}");
        }
    }

    #[test]
    fn denied_packages_are_found() {
        let rules = rules();
        let good = [package("a", "1.0.0", "MIT"), package("b", "1.0.0", "Apache-2.0")];
        assert_eq!(rules.findings(&good), [""; 0]);
        let twice = [package("a", "1.0.0", "MIT"), package("a", "2.0.0", "MIT")];
        assert_eq!(rules.findings(&twice), ["a is there as 1.0.0 and 2.0.0"]);
        let known = [package("syn", "2.0.9", "MIT"), package("syn", "3.0.0", "MIT")];
        assert_eq!(rules.findings(&known), [""; 0]);
        let mut foreign = package("a", "1.0.0", "MIT");
        foreign.source = Some("git+https://example.org/a".into());
        let unlicensed = Package { license: None, ..package("c", "1.0.0", "MIT") };
        assert_eq!(rules.findings(&[foreign, unlicensed]).len(), 2);
    }
}
