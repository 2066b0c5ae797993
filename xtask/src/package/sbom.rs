//! The list of the contents (a software bill of materials), in CycloneDX's JSON.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Value, json};

use super::build::{Machine, output, read};
use crate::workspace::{cargo, root};

const SHIPPED: [&str; 4] = ["anyverbs-capi", "anyverbs-view", "anyverbs-rspreload", "anyverbs-cli"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    description: Option<String>,
    source: Option<String>,
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

/// The list for one kind of machine.
pub(super) fn cyclonedx(machine: Machine, version: &str) -> anyhow::Result<Vec<u8>> {
    let arguments =
        ["metadata", "--locked", "--format-version=1", "--filter-platform", machine.triple];
    let metadata: Metadata = serde_json::from_str(&output(cargo().args(arguments))?)?;
    let lock: Lock = toml::from_str(&String::from_utf8(read(&root().join("Cargo.lock"))?)?)?;
    let document = document(&metadata, &lock, version)?;
    let mut text = serde_json::to_vec_pretty(&document)?;
    text.push(b'\n');
    Ok(text)
}

fn document(metadata: &Metadata, lock: &Lock, version: &str) -> anyhow::Result<Value> {
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (&*package.id, package)).collect();
    let linked: BTreeMap<&str, Vec<&str>> =
        metadata.resolve.nodes.iter().map(|node| (&*node.id, linked(node))).collect();
    let mut inside = BTreeSet::new();
    let mut open: Vec<&str> = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_none() && SHIPPED.contains(&&*package.name))
        .map(|package| &*package.id)
        .collect();
    while let Some(id) = open.pop() {
        if inside.insert(id) {
            open.extend(linked.get(id).context("cargo names a package that it does not describe")?);
        }
    }
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    for id in &inside {
        let package =
            packages.get(id).context("cargo names a package that it does not describe")?;
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
        let mut on: Vec<String> = linked[id]
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

fn linked(node: &Node) -> Vec<&str> {
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
    fn packages_for_building_or_testing_are_left_out() {
        let metadata: Metadata = serde_json::from_value(json!({
            "packages": [
                { "id": "cli", "name": "anyverbs-cli", "version": "1.0.0", "license": "MIT/Apache-2.0" },
                { "id": "a", "name": "a", "version": "2.0.0", "source": "registry" },
                { "id": "b", "name": "b", "version": "3.0.0", "source": "registry" },
                { "id": "c", "name": "c", "version": "4.0.0", "source": "registry" },
            ],
            "resolve": { "nodes": [
                { "id": "cli", "deps": [
                    { "pkg": "a", "dep_kinds": [{ "kind": "build" }, { "kind": null }] },
                    { "pkg": "b", "dep_kinds": [{ "kind": "dev" }] },
                ] },
                { "id": "a", "deps": [{ "pkg": "c", "dep_kinds": [{ "kind": null }] }] },
                { "id": "b", "deps": [] },
                { "id": "c", "deps": [] },
            ] },
        }))
        .unwrap();
        let lock: Lock =
            toml::from_str("[[package]]\nname = 'a'\nversion = '2.0.0'\nchecksum = 'abc'").unwrap();
        let document = document(&metadata, &lock, "1.0.0").unwrap();
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
    }
}
