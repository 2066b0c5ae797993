//! The list of the contents (a software bill of materials), in CycloneDX's JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::build::{Machine, SHIPPED, output, read};
use crate::workspace::{cargo, root};

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

/// A package that cargo knows.
#[derive(Deserialize)]
pub(super) struct Package {
    id: String,
    pub(super) name: String,
    pub(super) version: String,
    license: Option<String>,
    description: Option<String>,
    #[serde(default)]
    pub(super) manifest_path: PathBuf,
    /// The registry; none for packages of the workspace.
    source: Option<String>,
}

impl Package {
    pub(super) fn is_of_others(&self) -> bool {
        self.source.is_some()
    }
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// None for linked packages; else the kind of packages that build or test.
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

fn metadata(machine: Machine) -> anyhow::Result<Metadata> {
    let arguments =
        ["metadata", "--locked", "--format-version=1", "--filter-platform", machine.triple];
    Ok(serde_json::from_str(&output(cargo().args(arguments))?)?)
}

/// The packages that are linked into the shipped files.
pub(super) fn linked(machine: Machine) -> anyhow::Result<Vec<Package>> {
    let listed = output(cargo().args(tree(machine)))?;
    let inside = inside(&listed)?;
    let mut packages = metadata(machine)?.packages;
    packages.retain(|package| inside.contains(&(&*package.name, &*package.version)));
    if packages.len() != inside.len() {
        bail!("cargo names {} packages, and describes {} of them", inside.len(), packages.len());
    }
    Ok(packages)
}

/// The list for one kind of machine.
pub(super) fn cyclonedx(machine: Machine, version: &str) -> anyhow::Result<Vec<u8>> {
    let metadata = metadata(machine)?;
    let lock: Lock = toml::from_str(&String::from_utf8(read(&root().join("Cargo.lock"))?)?)?;
    let listed = output(cargo().args(tree(machine)))?;
    let document = document(&metadata, &lock, &inside(&listed)?, version)?;
    let mut text = serde_json::to_vec_pretty(&document)?;
    text.push(b'\n');
    Ok(text)
}

/// The command for cargo that prints a line for each package linked into the shipped ones. Its metadata cannot tell: they have the
/// features that any package of the workspace asks for.
fn tree(machine: Machine) -> Vec<&'static str> {
    let mut arguments = vec!["tree", "--locked", "--target", machine.triple];
    arguments.extend(["--edges=normal,no-proc-macro", "--prefix=none", "--no-dedupe"]);
    arguments.extend(SHIPPED.iter().flat_map(|package| ["-p", package]));
    arguments
}

/// Names and versions, from lines such as `anyhow v1.0.104` with words about the place after them.
fn inside(lines: &str) -> anyhow::Result<BTreeSet<(&str, &str)>> {
    let mut packages = BTreeSet::new();
    for line in lines.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default();
        let version = words.next().and_then(|word| word.strip_prefix('v'));
        packages.insert((name, version.with_context(|| format!("no version in {line:?}"))?));
    }
    Ok(packages)
}

fn document(
    metadata: &Metadata,
    lock: &Lock,
    inside: &BTreeSet<(&str, &str)>,
    version: &str,
) -> anyhow::Result<Value> {
    let packages: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .filter(|package| inside.contains(&(&*package.name, &*package.version)))
        .map(|package| (&*package.id, package))
        .collect();
    if packages.len() != inside.len() {
        bail!("cargo names {} packages, and describes {} of them", inside.len(), packages.len());
    }
    let linked: BTreeMap<&str, Vec<&str>> =
        metadata.resolve.nodes.iter().map(|node| (&*node.id, linked_by(node))).collect();
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    for (id, package) in &packages {
        let checksum = lock
            .package
            .iter()
            .find(|locked| locked.name == package.name && locked.version == package.version)
            .and_then(|locked| locked.checksum.as_ref());
        let mut component = json!({
            "type": "library",
            "bom-ref": purl(package),
            "name": package.name,
            "version": package.version,
            "purl": purl(package),
        });
        if let Some(description) = &package.description {
            component["description"] = description.trim().into();
        }
        if let Some(license) = &package.license {
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(checksum) = checksum {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        components.push((purl(package), component));
        let mut on: Vec<String> = linked
            .get(id)
            .context("cargo resolves no dependencies of a package")?
            .iter()
            .filter_map(|id| packages.get(id).map(|package| purl(package)))
            .collect();
        on.sort();
        dependencies.push((purl(package), json!({ "ref": purl(package), "dependsOn": on })));
    }
    components.sort_by(|a, b| a.0.cmp(&b.0));
    dependencies.sort_by(|a, b| a.0.cmp(&b.0));
    let values =
        |list: Vec<(String, Value)>| list.into_iter().map(|(_, value)| value).collect::<Value>();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": { "type": "application", "name": "anyverbs", "version": version },
        },
        "components": values(components),
        "dependencies": values(dependencies),
    }))
}

fn linked_by(node: &Node) -> Vec<&str> {
    let is_linked =
        |dependency: &&Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
    node.deps.iter().filter(is_linked).map(|dependency| &*dependency.pkg).collect()
}

fn purl(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cargo_links_alone_is_listed() {
        let metadata: Metadata = serde_json::from_value(json!({
            "packages": [
                { "id": "cli", "name": "anyverbs-cli", "version": "1.0.0", "license": "MIT/Apache-2.0" },
                { "id": "a", "name": "a", "version": "2.0.0" },
                { "id": "old", "name": "a", "version": "1.0.0" },
                { "id": "b", "name": "b", "version": "3.0.0" },
                { "id": "c", "name": "c", "version": "4.0.0" },
                { "id": "d", "name": "d", "version": "5.0.0" },
            ],
            "resolve": { "nodes": [
                { "id": "cli", "deps": [
                    { "pkg": "a", "dep_kinds": [{ "kind": "build" }, { "kind": null }] },
                    { "pkg": "b", "dep_kinds": [{ "kind": "dev" }] },
                    { "pkg": "d", "dep_kinds": [{ "kind": null }] },
                ] },
                { "id": "a", "deps": [{ "pkg": "c", "dep_kinds": [{ "kind": null }] }] },
                { "id": "old", "deps": [] },
                { "id": "b", "deps": [] },
                { "id": "c", "deps": [] },
                { "id": "d", "deps": [] },
            ] },
        }))
        .unwrap();
        let lock: Lock =
            toml::from_str("[[package]]\nname = 'a'\nversion = '2.0.0'\nchecksum = 'abc'").unwrap();
        let listed = "anyverbs-cli v1.0.0 (/checkout/cli)\na v2.0.0\nc v4.0.0\n\na v2.0.0\n";
        let document = document(&metadata, &lock, &inside(listed).unwrap(), "1.0.0").unwrap();
        let names: Vec<&str> = document["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["a", "anyverbs-cli", "c"]);
        assert_eq!(document["components"][0]["hashes"][0]["content"], "abc");
        assert_eq!(document["components"][1]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(document["dependencies"][1]["dependsOn"], json!(["pkg:cargo/a@2.0.0"]));
        assert_eq!(document["dependencies"][0]["dependsOn"], json!(["pkg:cargo/c@4.0.0"]));
    }

    /// The crate has async-await on tokio, for Rust programs, which no shipped file has.
    #[test]
    fn a_feature_that_is_not_shipped_adds_nothing() {
        let text = cyclonedx(super::super::build::MACHINES[0], "1.0.0").unwrap();
        let document: Value = serde_json::from_slice(&text).unwrap();
        let components = document["components"].as_array().unwrap();
        let has = |name: &str| components.iter().any(|component| component["name"] == name);
        assert!(has("anyverbs") && has("libc"));
        assert!(!has("tokio") && !has("syn"));
    }
}
