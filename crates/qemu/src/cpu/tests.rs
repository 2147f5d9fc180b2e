//! Tests with synthetic hosts, made of features and a few models as QEMU would describe them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::subsequence;

use super::*;

fn set(names: &[&str]) -> CpuFeatures {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Features of every 64-bit model here.
const BASE: [&str; 4] = ["fpu", "lm", "sse", "sse2"];

/// Models and their features, fewer than the real ones have: two generations of each vendor, TSX in
/// one of them, and vendor-specific features in others.
fn definitions() -> BTreeMap<String, CpuFeatures> {
    let of = |more: &[&str]| BASE.iter().chain(more).map(|name| (*name).to_owned()).collect();
    [
        ("Nehalem-v1", of(&["pni", "sse4.2"])),
        ("Haswell-v1", of(&["pni", "sse4.2", "xsave", "avx2", "hle", "rtm"])),
        ("Haswell-v2", of(&["pni", "sse4.2", "xsave", "avx2"])),
        (
            "SapphireRapids-v1",
            of(&["pni", "sse4.2", "xsave", "avx2", "avx512f", "spec-ctrl", "rtm"]),
        ),
        ("Opteron_G1-v1", of(&[])),
        ("Opteron_G3-v1", of(&["pni", "sse4a"])),
        ("EPYC-v1", of(&["pni", "sse4.2", "xsave", "avx2", "sse4a", "ibpb", "nrip-save"])),
    ]
    .into_iter()
    .map(|(name, features)| (name.to_owned(), features))
    .collect()
}

/// Features that hosts here may have beside the base.
const OPTIONAL: [&str; 16] = [
    "pni",
    "sse4.2",
    "xsave",
    "avx2",
    "hle",
    "rtm",
    "avx512f",
    "spec-ctrl",
    "sse4a",
    "ibpb",
    "nrip-save",
    "aes",
    "sha-ni",
    "svm",
    "vmx-ept",
    "pku",
];

fn host(vendor: &str, accel: Accelerator, more: &[&str]) -> HostCpu {
    let features: CpuFeatures = BASE.iter().chain(more).map(|name| (*name).to_owned()).collect();
    let definitions = definitions();
    let missing = |holds: &CpuFeatures| holds.difference(&features).cloned().collect();
    let mut models: BTreeMap<String, CpuFeatures> =
        definitions.iter().map(|(name, holds)| (name.clone(), missing(holds))).collect();
    models.insert("Haswell".to_owned(), models["Haswell-v1"].clone());
    models.insert("max".to_owned(), CpuFeatures::new());
    let aliases = [("Haswell".to_owned(), "Haswell-v1".to_owned())].into();
    let (vendor, name, deprecated) = (vendor.to_owned(), String::new(), BTreeSet::new());
    let most_vcpus = BTreeMap::new();
    HostCpu { vendor, name, accel, features, models, definitions, aliases, deprecated, most_vcpus }
}

fn intel(more: &[&str]) -> HostCpu {
    host(INTEL, Accelerator::Kvm, more)
}

fn amd(more: &[&str]) -> HostCpu {
    host(AMD, Accelerator::Kvm, more)
}

fn named(hosts: &[HostCpu]) -> Vec<(String, &HostCpu)> {
    hosts.iter().enumerate().map(|(index, host)| (format!("h{index}"), host)).collect()
}

fn borrowed<'a>(hosts: &'a [(String, &'a HostCpu)]) -> Vec<(&'a str, &'a HostCpu)> {
    hosts.iter().map(|(name, host)| (name.as_str(), *host)).collect()
}

fn common(hosts: &[HostCpu]) -> Result<Common, NoCommon> {
    common_baseline(&borrowed(&named(hosts)))
}

const HASWELL: [&str; 5] = ["pni", "sse4.2", "xsave", "avx2", "aes"];

#[test]
fn hosts_of_one_vendor_get_the_newest_model_and_further_common_features() {
    let old = intel(&HASWELL);
    let new = intel(&["pni", "sse4.2", "xsave", "avx2", "aes", "avx512f", "spec-ctrl", "svm"]);
    let common = common(&[new, old]).unwrap();
    assert_eq!(common.baseline.cpu_model, "Haswell-v2,+aes");
    assert_eq!(common.beyond["h0"], set(&["avx512f", "spec-ctrl", "svm"]));
    assert_eq!(common.beyond["h1"], set(&[]));
}

#[test]
fn features_removed_by_microcode_are_left_out_and_keep_the_model() {
    let with = intel(&["pni", "sse4.2", "xsave", "avx2", "avx512f", "spec-ctrl", "rtm"]);
    let without = intel(&["pni", "sse4.2", "xsave", "avx2", "avx512f", "spec-ctrl"]);
    for hosts in [vec![with.clone()], vec![with, without]] {
        assert_eq!(common(&hosts).unwrap().baseline.cpu_model, "SapphireRapids-v1,-rtm");
    }
}

#[test]
fn a_deprecated_model_is_not_a_baseline() {
    let mut newer = intel(&HASWELL);
    newer.deprecated = ["Haswell-v2".to_owned()].into();
    assert_eq!(newer.best_models().last(), Some(&"Haswell-v1"));
    let common = common(&[intel(&HASWELL), newer]).unwrap();
    assert_eq!(common.baseline.cpu_model, "Haswell-v1,-hle,-rtm,+aes");
}

#[test]
fn both_vendors_share_the_listed_features() {
    let intel = intel(&["pni", "sse4.2", "xsave", "avx2", "aes", "pku", "avx512f", "spec-ctrl"]);
    let amd = amd(&["pni", "sse4.2", "xsave", "avx2", "aes", "pku", "avx512f", "ibpb", "sse4a"]);
    let common = common(&[intel, amd]).unwrap();
    assert_eq!(common.baseline.cpu_model, "Haswell-v2,+aes,vendor=GenuineIntel");
    assert_eq!(common.vendors.len(), 2);
}

#[test]
fn a_model_from_before_avx_gets_the_xsave_leaf() {
    let old = host(AMD, Accelerator::Tcg, &["pni", "xsave"]);
    assert_eq!(
        common(&[old]).unwrap().baseline.cpu_model,
        "Opteron_G1-v1,+pni,+xsave,min-level=13"
    );
}

#[test]
fn kvm_and_tcg_have_nothing_in_common() {
    let error = common(&[intel(&[]), host(INTEL, Accelerator::Tcg, &[]), intel(&[])]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "h0, h2 run guests under KVM and h1 runs guests under TCG: no guest moves between the two"
    );
    assert_eq!(common(&[]).unwrap_err(), NoCommon::NoHosts);
}

#[test]
fn the_features_a_guest_would_miss_are_named() {
    let host = intel(&HASWELL);
    let missing = |text: &str| match host.runs(&CpuModel::parse(text)) {
        Err(Unfit::Missing { missing, .. }) => missing,
        Ok(()) => CpuFeatures::new(),
        Err(other) => panic!("{other}"),
    };
    assert_eq!(missing("Haswell-v2"), set(&[]));
    assert_eq!(missing("Haswell"), set(&["hle", "rtm"]));
    assert_eq!(missing("Haswell,-hle,-rtm,+aes"), set(&[]));
    assert_eq!(missing("SapphireRapids-v1,+pku,-rtm"), set(&["avx512f", "pku", "spec-ctrl"]));
    assert_eq!(missing("SapphireRapids-v1,enforce=off"), set(&[]));
    assert_eq!(missing("Haswell-v2,+pmu,hv-time,+kvm-pv-eoi"), set(&[]));
    let unknown = host.runs(&CpuModel::parse("Zen9,+avx2")).unwrap_err();
    assert_eq!(unknown, Unfit::UnknownModel { model: "Zen9".to_owned() });
}

#[test]
fn a_guest_keeps_its_features_and_vendor() {
    let (old, new) = (intel(&HASWELL), intel(&["pni", "sse4.2", "xsave", "avx2", "aes", "pku"]));
    let other = amd(&["pni", "sse4.2", "xsave", "avx2", "aes", "pku"]);
    let own = CpuModel::parse("max");
    assert_eq!(new.takes_over(&own, &old), Ok(()));
    assert!(matches!(
        old.takes_over(&own, &new),
        Err(Unfit::Missing { missing, .. }) if missing == set(&["pku"])
    ));
    let fixed = CpuModel::parse("Haswell-v2");
    assert_eq!(old.takes_over(&fixed, &new), Ok(()));
    assert!(matches!(other.takes_over(&fixed, &new), Err(Unfit::OtherVendor { .. })));
    assert_eq!(other.takes_over(&CpuModel::parse("Haswell-v2,vendor=GenuineIntel"), &new), Ok(()));
    let translated = host(INTEL, Accelerator::Tcg, &HASWELL);
    assert!(matches!(translated.takes_over(&fixed, &new), Err(Unfit::OtherAccelerator { .. })));
}

#[test]
fn a_level_names_a_baseline() {
    let hosts = [("a", &intel(&HASWELL))];
    let v3 = Baseline::named("x86-64-v3", &hosts).unwrap();
    assert!(PsabiLevel::V3.features().is_subset(&v3.features));
    assert!(
        v3.cpu_model.starts_with("Nehalem-v1,+") && v3.cpu_model.ends_with(",min-level=13"),
        "{}",
        v3.cpu_model
    );
    assert!(hosts[0].1.lacks_of(&v3).contains("movbe"));
    let model = Baseline::named("Haswell,-hle", &hosts).unwrap();
    assert!(model.features.contains("rtm") && !model.features.contains("hle"));
    assert_eq!(Baseline::named("Zen9", &hosts), None);
}

#[test]
fn a_new_baseline_lists_the_affected_vms_and_hosts() {
    let (old, new) = (intel(&["pni", "sse4.2"]), intel(&HASWELL));
    let hosts = [("old", &old), ("new", &new)];
    let vm = |name: &str, cpu_model: &str| RunningVm {
        name: name.to_owned(),
        cpu_model: cpu_model.to_owned(),
        host: "new".to_owned(),
    };
    let vms =
        [vm("n", "Nehalem-v1"), vm("h", "Haswell-v2"), vm("own", "max"), vm("odd", "pentium3")];
    let unmet =
        |name: &str, features: &[&str]| Unmet { name: name.to_owned(), features: set(features) };
    let raised = change_of_baseline(&Baseline::named("Haswell-v2", &hosts).unwrap(), &hosts, &vms);
    assert_eq!(raised.behind, [unmet("n", &["avx2", "xsave"])]);
    assert_eq!(raised.beyond, [unmet("own", &["aes"])]);
    assert_eq!(raised.out, [unmet("old", &["avx2", "xsave"])]);
    assert_eq!(raised.unknown, ["odd"]);
    let lowered = change_of_baseline(&Baseline::named("Nehalem-v1", &hosts).unwrap(), &hosts, &vms);
    assert_eq!(lowered.behind, []);
    assert_eq!(lowered.out, []);
    assert_eq!(
        lowered.beyond,
        [unmet("h", &["avx2", "xsave"]), unmet("own", &["aes", "avx2", "xsave"])]
    );
}

fn any_host() -> impl Strategy<Value = HostCpu> {
    let vendor = prop_oneof![Just(INTEL), Just(AMD)];
    (vendor, subsequence(OPTIONAL.to_vec(), 0..=OPTIONAL.len()))
        .prop_map(|(vendor, more)| host(vendor, Accelerator::Kvm, &more))
}

proptest! {
    #[test]
    fn each_host_satisfies_the_common_baseline(
        hosts in prop::collection::vec(any_host(), 1..6),
    ) {
        let baseline = common(&hosts).unwrap().baseline;
        for host in &hosts {
            prop_assert_eq!(host.lacks_of(&baseline), CpuFeatures::new(), "{}", baseline.cpu_model);
            prop_assert_eq!(host.features_of(&baseline.model()), Some(baseline.features.clone()));
        }
    }

    #[test]
    fn another_host_never_adds_a_feature(
        hosts in prop::collection::vec(any_host(), 1..5),
        another in any_host(),
    ) {
        let before = common(&hosts).unwrap().baseline.features;
        let after = common(&[hosts, vec![another]].concat()).unwrap().baseline.features;
        prop_assert!(after.is_subset(&before), "{after:?} {before:?}");
    }

    #[test]
    fn order_does_not_matter(
        (hosts, shuffled) in prop::collection::vec(any_host(), 1..6)
            .prop_flat_map(|hosts| (Just(hosts.clone()), Just(hosts).prop_shuffle())),
    ) {
        prop_assert_eq!(common(&hosts).unwrap().baseline, common(&shuffled).unwrap().baseline);
    }

    #[test]
    fn a_guest_with_the_baseline_can_move_to_every_host_that_satisfies_it(
        hosts in prop::collection::vec(any_host(), 1..4),
        others in prop::collection::vec(any_host(), 0..6),
    ) {
        let common = common(&hosts).unwrap();
        let (model, source) = (common.baseline.model(), &hosts[0]);
        // Hosts of the other vendor are out of scope for a baseline of one vendor.
        let may_go = |host: &&HostCpu| common.vendors.contains(&host.vendor);
        let satisfies = |host: &&HostCpu| host.lacks_of(&common.baseline).is_empty();
        for host in hosts.iter().chain(&others).filter(may_go).filter(satisfies) {
            prop_assert_eq!(host.takes_over(&model, source), Ok(()));
        }
    }

    #[test]
    fn a_host_that_lacks_a_feature_of_the_baseline_is_refused(
        hosts in prop::collection::vec(any_host(), 1..4),
        other in any_host(),
    ) {
        let baseline = common(&hosts).unwrap().baseline;
        prop_assert_eq!(
            other.lacks_of(&baseline).is_empty(),
            other.runs(&baseline.model()).is_ok()
        );
    }
}
